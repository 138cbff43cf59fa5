"""vLLM on these kernels; `register()` is the entry point of the plugin.

Written for the interface of vLLM 0.33.0. Nothing of vLLM is imported before it calls `register`.
"""

from __future__ import annotations

from typing import Any

NAME = "BLACKWELL_KERNELS"  # --attention-backend
BACKEND = "blackwell_engines.vllm.backend.BlackwellKernelsBackend"


def register() -> None:
    """Tell vLLM of the attention backend and of the experts, which are then chosen by name alone.
    Processes call it more than once.

    Raises:
        ImportError: where vllm is not installed, or has no registry of them.
    """
    attention_backend()
    import blackwell_engines.vllm.quantization  # noqa: F401  # registers the experts


def attention_backend() -> Any:
    """Return the member `NAME` of vLLM's `AttentionBackendEnum`.

    vLLM pickles it to processes that have not loaded plugins yet, so it is unpickled by a call of
    this function.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, BACKEND)
        AttentionBackendEnum[NAME].__reduce_ex__ = lambda protocol: (attention_backend, ())
    return AttentionBackendEnum[NAME]
