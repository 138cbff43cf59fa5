"""SGLang on these kernels; `register()` is the entry point of the plugin.

Written for the interface of SGLang 0.5.23. Nothing of it is imported before it calls `register`.
"""

from __future__ import annotations

from typing import Any

NAME = "blackwell_kernels"  # --attention-backend


def register() -> None:
    """Tell SGLang of the backend `NAME`, which is then chosen by that name alone. Processes call it
    more than once.

    Raises:
        ImportError: where sglang is not installed, or has no registry of attention backends.
    """
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from blackwell_engines.sglang import quantization

    if NAME not in ATTENTION_BACKEND_CHOICES:
        ATTENTION_BACKEND_CHOICES.append(NAME)
        register_attention_backend(NAME)(create)
    quantization.register()


def create(runner: Any) -> Any:
    """The backend of a `ModelRunner`; what it raises is `backend.BlackwellKernelsBackend`'s."""
    from blackwell_engines.sglang.backend import BlackwellKernelsBackend

    return BlackwellKernelsBackend(runner)
