"""vLLM on these kernels; `register()` is the entry point of the plugin.

Written for the interface of vLLM 0.33.0. Nothing of vLLM is imported before it calls `register`.
"""

from __future__ import annotations

from typing import Any

NAME = "BLACKWELL_KERNELS"  # --attention-backend
BACKEND = "blackwell_engines.vllm.backend.BlackwellKernelsBackend"


def register() -> Any:
    """Tell vLLM of the backend `NAME`, which is then chosen by that name alone. Processes call it
    more than once.

    vLLM pickles the name's member to processes that have not loaded plugins yet, so it is unpickled
    by a call of this function.

    Returns:
        The member of vLLM's `AttentionBackendEnum`.

    Raises:
        ImportError: where vllm is not installed, or has no registry of attention backends.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, BACKEND)
        AttentionBackendEnum[NAME].__reduce_ex__ = lambda protocol: (register, ())
    import blackwell_engines.vllm.quantization  # noqa: F401  # registers the experts

    return AttentionBackendEnum[NAME]
