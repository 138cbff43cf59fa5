"""FlashAttention-4 where it is installed: what its forward pass launches, recorded.

Any version will do, with the DSL that it was written for: `ptxemu` runs in its environment, so that
the machine code is that of the compiler in question.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cycle_model.gpus import B200
from cycle_model.parameters.parameter import Gpu
from ptxemu.host.emulator import Emulator
from ptxemu.host.gpu_machine import machine_with_gpu
from ptxemu.host.patching import environment, patched
from ptxemu.record.recording import Recording
from ptxemu.watch import watched

HOW_TO_GET = (
    "FlashAttention-4 is not installed: `pip install flash-attn-4 quack-kernels triton`, or name a "
    "checkout of flash-attention with --source"
)
_GOLDEN = 0.6180339887  # its multiples leave no gap, whatever the period of the grid


@dataclass(frozen=True)
class Shape:
    """Of one forward pass; seqlen both of queries and of keys."""

    head_dim: int
    causal: bool
    batch: int
    seqlen: int
    heads: int
    kv_heads: int

    @property
    def flops(self) -> float:
        """As benchmarks count them: half of the products of a causal one."""
        products = self.batch * self.heads * self.seqlen**2 * self.head_dim
        return 4 * products / (2 if self.causal else 1)


def from_source(folder: Path) -> None:
    """Take `flash_attn.cute` from a checkout; its `flash_attn` itself would ask for a CUDA library.
    ValueError where there is none."""
    if not (folder / "flash_attn" / "cute").is_dir():
        raise ValueError(f"{folder}: has no flash_attn/cute")
    package = types.ModuleType("flash_attn")
    package.__path__ = [str(folder / "flash_attn")]
    sys.modules["flash_attn"] = package


@contextmanager
def flash_attention(gpu: Gpu = B200) -> Iterator[Callable[..., Any]]:
    """Its function, on a machine that seems to have that GPU: the code depends on its architecture
    and number of SMs. One GPU per process, since it remembers what it has compiled. ValueError,
    with how to get it, where it or something that it needs is not installed."""
    chosen = {"CUTE_DSL_ARCH": gpu.arch, "FLASH_ATTENTION_ARCH": gpu.arch}
    with environment(chosen), machine_with_gpu(Emulator()), _multiprocessors(gpu.sms):
        try:
            found = importlib.import_module("flash_attn.cute").flash_attn_func
        except (ImportError, AttributeError) as missing:
            raise ValueError(f"{HOW_TO_GET} ({missing})") from missing
        yield found


def _multiprocessors(count: int) -> AbstractContextManager[None]:
    """What persistent kernels ask the DSL for."""
    from cutlass.utils import HardwareInfo

    return patched(HardwareInfo, {"get_device_multiprocessor_count": lambda self: count})


def recorded(call: Callable[[], object], clusters: Any) -> list[Recording]:
    """What the call launches that has machine code; clusters: of each grid, as an option of the
    emulator."""
    with watched(record=True, limit=None, clusters=clusters) as report:
        call()
    return [each.recording for each in report.launches if each.recording and each.recording.cubin]


def call_of(function: Callable[..., Any], shape: Shape, queries: int = 0) -> Callable[[], object]:
    """With random inputs; the entries of a batch are alike. queries: 0 for as many as keys."""
    import torch

    def drawn(heads: int, tokens: int = shape.seqlen) -> Any:
        one = torch.randn(1, tokens, heads, shape.head_dim, generator=generator).bfloat16()
        return one.repeat(shape.batch, 1, 1, 1)

    generator = torch.Generator().manual_seed(0)
    q = drawn(shape.heads, queries or shape.seqlen)
    k, v = (drawn(shape.kv_heads) for _ in range(2))
    return lambda: function(q, k, v, causal=shape.causal)


def spread(total: int, count: int) -> list[int]:
    """So many clusters of a grid, one of each of as many equal parts, at places that differ, since
    a grid that orders its work in periods would show the same of it to equal distances; and the one
    beside the first."""
    if count >= total:
        return list(range(total))
    bounds = [part * total // count for part in range(count + 1)]
    found = {
        low + int((high - low) * (part * _GOLDEN % 1))
        for part, (low, high) in enumerate(itertools.pairwise(bounds))
    }
    return sorted(found | {min(found) + 1})
