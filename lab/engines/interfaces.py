"""Names of an engine that our plugins use, with their signatures: `python -m ... ENGINE`.

It runs in an environment of the engines and prints JSON: name -> signature, None where it is gone.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys

BACKEND, REGISTRY = "vllm.v1.attention.backend", "vllm.v1.attention.backends.registry"
RADIX = "sglang.srt.layers.radix_attention"
POOL, BATCH = "sglang.srt.mem_cache.memory_pool", "sglang.srt.model_executor.forward_batch_info"
NAMES = {
    "vllm": (
        f"{BACKEND}:AttentionBackend.validate_configuration",
        f"{BACKEND}:AttentionBackend.supports_combination",
        f"{BACKEND}:AttentionBackend.get_supported_kernel_block_sizes",
        f"{BACKEND}:AttentionMetadataBuilder.__init__",
        f"{BACKEND}:AttentionMetadataBuilder.build",
        f"{BACKEND}:AttentionMetadataBuilder.build_for_cudagraph_capture",
        f"{BACKEND}:AttentionMetadataBuilder._init_reorder_batch_threshold",
        f"{BACKEND}:AttentionImpl.__init__",
        f"{BACKEND}:AttentionImpl.forward",
        f"{BACKEND}:AttentionImplBase.process_weights_after_loading",
        f"{BACKEND}:CommonAttentionMetadata",
        f"{BACKEND}:AttentionCGSupport",
        f"{BACKEND}:AttentionType",
        f"{REGISTRY}:register_backend",
        f"{REGISTRY}:AttentionBackendEnum.register",
        f"{REGISTRY}:AttentionBackendEnum.get_class",
    ),
    "sglang": (
        "sglang.srt.arg_groups.choices:ATTENTION_BACKEND_CHOICES",
        "sglang.srt.layers.attention.attention_registry:register_attention_backend",
        "sglang.srt.layers.attention.base_attn_backend:AttentionBackend.forward_decode",
        "sglang.srt.layers.attention.base_attn_backend:AttentionBackend.forward_extend",
        "sglang.srt.layers.attention.base_attn_backend:AttentionBackend.init_forward_metadata",
        f"{RADIX}:RadixAttention.__init__",
        f"{POOL}:KVWriteLoc.for_batch",
        f"{POOL}:MHATokenToKVPool.set_kv_buffer",
        f"{POOL}:MHATokenToKVPool.get_kv_buffer",
        f"{BATCH}:ForwardBatch",
        f"{BATCH}:ForwardMode",
    ),
}


def described(name: str) -> str | None:
    """The signature of 'module:Class.function', the fields of a class without one of its own."""
    module, _, path = name.partition(":")
    try:
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    try:
        return str(inspect.signature(found))
    except (TypeError, ValueError):
        return type(found).__name__


if __name__ == "__main__":
    print(json.dumps({name: described(name) for name in NAMES[sys.argv[1]]}))
