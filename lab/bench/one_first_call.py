"""The first call of an operator in this process, as JSON.

With WITHOUT_DSL in the environment the DSL cannot be imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import torch


def problem(name: str, device: str) -> Callable[[], object]:
    """A small call; inputs are made here, the package is imported by the call."""
    q, k = (torch.randn(1, n, 2, 64, device=device).bfloat16() for n in (16, 33))
    if name == "attention":
        return lambda: __import__("fmha").attention(q, k, k, causal=True)
    if name == "decode":
        return lambda: __import__("gqa_lowlatency").decode(q[:, 0], k, k)
    if name == "merge":
        parts = torch.randn(2, 1, 4, 8, 128, device=device), torch.randn(2, 1, 8, 4, device=device)
        return lambda: __import__("fmha").merge(parts)
    if name == "moe":
        return _layer(device)
    return _append(device)


def _layer(device: str) -> Callable[[], object]:
    import moe

    weights = torch.randn(3, 256, 256).bfloat16(), torch.randn(3, 256, 128).bfloat16()
    experts = moe.pack(*weights, "mxfp8")
    x, logits = torch.randn(4, 256, device=device).bfloat16(), torch.randn(4, 3, device=device)
    return lambda: moe.fused_moe(x, experts, logits, moe.Router(2))


def _append(device: str) -> Callable[[], object]:
    pool = torch.zeros(4, 64 * 1024, dtype=torch.uint8, device=device)
    tokens, angles = torch.arange(5, device=device), torch.randn(2, 16, 32, device=device)
    latent = torch.randn(5, 512, device=device).bfloat16()

    def run() -> object:
        from kvcache import append_swa
        from kvcache.layouts.records import BF16_512
        from kvcache.layouts.rows import Rows

        return append_swa(Rows(pool, 0, 0, 64, BF16_512), latent, tokens, tokens, *angles)

    return run


def main(name: str, device: str) -> int:
    if os.environ.get("WITHOUT_DSL"):
        sys.modules["cutlass"] = None
    run = problem(name, device)
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    from kernelkit.compile import compiler as kernel_compile

    ours, make = [], kernel_compile._make

    def timed(*key: object) -> object:
        start = time.perf_counter()
        try:
            return make(*key)
        finally:
            ours.append(time.perf_counter() - start)

    kernel_compile._make = timed
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    graph = _captured(run) if device == "cuda" else 0.0
    dsl = sys.modules.get("cutlass") is not None
    print(json.dumps({"seconds": seconds, "ours": sum(ours), "graph": graph, "dsl": dsl}))
    return 0


def _captured(run: Callable[[], object]) -> float:
    """Seconds that capturing and replaying the call once take."""
    began = time.perf_counter()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
