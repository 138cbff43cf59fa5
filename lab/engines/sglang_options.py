"""Options of SGLang's `Engine` and of its server, in all runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ENGINE: Mapping[str, Any] = {  # in every run
    "attention_backend": "blackwell_kernels", "skip_tokenizer_init": True, "device": "cpu",
    "dtype": "bfloat16", "disable_cuda_graph": True, "page_size": 16, "max_total_tokens": 1024,
    "max_running_requests": 4, "context_length": 256, "chunked_prefill_size": 64,
    "mem_fraction_static": 0.3,
}  # fmt: skip
# Gauges that are 0 where nobody is served; an idle server writes them every 30 seconds.
LEFT = ("sglang:num_used_tokens", "sglang:num_running_reqs", "sglang:num_queue_reqs")


def server_words(model: str, port: int) -> list[str]:
    """Words after the environment's Python, for a model's folder."""
    return [
        "-m", "lab.engines.sglang_server", "--model-path", model, "--attention-backend",
        "blackwell_kernels", "--skip-tokenizer-init", "--device", "cpu", "--dtype", "bfloat16",
        "--disable-cuda-graph", "--page-size", "16", "--max-total-tokens", "2048",
        "--max-running-requests", "8", "--context-length", "128", "--chunked-prefill-size", "64",
        "--mem-fraction-static", "0.3", "--enable-metrics", "--host", "127.0.0.1",
        "--port", str(port),
    ]  # fmt: skip
