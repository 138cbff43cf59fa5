"""PTX of kernels where the lifetime of tensor memory begins and ends, and between the CTAs of a
pair: forms that the manual requires, but whose absence no emulator notices.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest

import gqa_lowlatency.launch as decode
import moe.launch as grouped
from fmha.config import AttentionConfig
from fmha.launch import compile_attention
from fmha.plan import make_plan
from gqa_lowlatency.config import DecodeConfig
from gqa_lowlatency.sm100.plan import BARRIERS as DECODE
from kernelkit.compile.compiler import compile_once
from mla.indexer.scores_config import BlockScaledConfig
from mla.indexer.scores_launch import SOURCES
from moe.config import GroupedConfig
from moe.mixed.config import MixedConfig
from moe.mixed.launch import KERNELS as MIXED
from ptxemu.machine.umma_desc import smem_desc

ALL_THREADS = 0
FREED = make_plan(AttentionConfig()).barriers.ids("read").start
SCORES = BlockScaledConfig("indexer_fp4", 64, 1, "fp32", box=32)


@dataclass(frozen=True)
class Kernel:
    """A kernel with tensor memory.

    make: compiles it.
    barrier: the last barrier before its tensor memory is freed.
    """

    make: Callable
    barrier: int = ALL_THREADS


KERNELS = {
    "attention": Kernel(
        lambda: compile_attention(AttentionConfig(right=True, kv_lens=True)), FREED
    ),
    "attention pair": Kernel(
        lambda: compile_attention(AttentionConfig(head_dim=256, right=True, kv_lens=True)),
        FREED,
    ),
    "decode": Kernel(
        lambda: decode.compile_for(DecodeConfig(head_dim=64, group=32), "sm_100a"),
        DECODE.ids("done").start,
    ),
    "grouped": Kernel(lambda: grouped.compile_for(GroupedConfig("mxfp8"), "sm_100a")),
    "grouped pair": Kernel(
        lambda: grouped.compile_for(GroupedConfig("mxfp8", tile_rows=256), "sm_100a")
    ),
    "mixed": Kernel(lambda: compile_once(MixedConfig("mxfp4"), "sm_100a", MIXED["sm_100a"])),
    "scores": Kernel(lambda: compile_once(SCORES, "sm_100a", SOURCES[BlockScaledConfig])),
}


@functools.cache
def instructions(name: str) -> tuple[str, ...]:
    """Instructions of a kernel in the order of the text, in which its roles follow each other."""
    lines = (line.strip() for line in KERNELS[name].make().ptx.splitlines())
    return tuple(re.sub(r"\s+", " ", line) for line in lines if line and line[0] not in "/.{}$")


def last(found: tuple[str, ...], pattern: str) -> int:
    """Index of the last instruction that begins with `pattern`."""
    return max(place for place, line in enumerate(found) if re.match(pattern, line))


@pytest.mark.parametrize("name", KERNELS)
def test_what_uses_tensor_memory_is_ordered_before_its_end(name):
    """A fence lies between the last use and the barrier after which the memory is freed."""
    found = instructions(name)
    barrier = last(found, rf"bar(rier)?\.sync {KERNELS[name].barrier}\b")
    assert barrier < last(found, r"tcgen05\.dealloc")
    used = last(found[:barrier], r"(@\S+ )?tcgen05\.")
    assert found[used] == "tcgen05.fence::before_thread_sync;"


@pytest.mark.parametrize("name", [name for name in KERNELS if "pair" in name])
def test_tensor_memory_of_a_pair_is_allocated_where_the_peer_is_known_to_run(name):
    """Allocation comes after a cluster barrier, and before the barrier after which the address is
    read."""
    found = instructions(name)
    places = [
        next(place for place, line in enumerate(found) if re.match(pattern, line))
        for pattern in (
            r"barrier\.cluster\.arrive",
            r"barrier\.cluster\.wait",
            r"tcgen05\.alloc\.cta_group::2",
            r"tcgen05\.fence::before_thread_sync",
            rf"bar(rier)?\.sync {ALL_THREADS}\b",
            r"tcgen05\.fence::after_thread_sync",
        )
    ]
    assert places == sorted(places)


@pytest.mark.parametrize("name", ["grouped pair", "scores"])
def test_descriptors_of_scale_factors(name):
    """Descriptors of copies to tensor memory are constants, except for the address."""
    found = instructions(name)
    copied = [re.search(r"(%rd\d+);", line)[1] for line in found if line.startswith("tcgen05.cp")]
    assert copied
    for register in copied:
        constants = [re.match(rf"or\.b64 {register}, %rd\d+, (\d+);", line) for line in found]
        (constant,) = filter(None, constants)
        desc = smem_desc(int(constant[1]))
        assert (desc.start, desc.leading, desc.stride, desc.swizzle.bits) == (0, 16, 128, 0)
