"""Every config of every family binds, on each of its architectures, and gives one time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from cycle_model.gpus import for_arch
from cycle_model.grid import LaunchModel
from cycle_model.launch import bind
from cycle_model.sass.tools import HOW_TO_GET_TOOLS, tools_found
from fmha import AttentionConfig, attention
from gqa_lowlatency import decode
from kernelkit.call.launch import emulation
from kernelkit.compile.compiler import collecting
from lab.flags.steps import FAMILIES, NATIVE_ONLY, SMALL_HIDDEN, SMALL_ROWS
from lab.problems.attention import Case
from lab.problems.grouped_gemm import Case as GroupedCase
from lab.problems.steps import problems_of
from moe import grouped_gemm
from moe.config import GroupedConfig
from ptxemu.native.accesses import COPIED
from ptxemu.options import Options
from ptxemu.record.recording import Recording
from ptxemu.watch import watched
from tests.fmha import test_static_sass as attention_tables
from tests.gqa_lowlatency.space import MATRIX as DECODES
from tests.moe import test_static as expert_tables

# The smallest problem that reaches each config of the packages' test tables, as calls without
# references: their launches are recorded.

ARCHS = ("sm_90a", "sm_100a")
QUERIES, KEYS = 40, 300  # more than two tiles of keys: some lie fully inside the mask
WINDOW, FIRST, ROPE = 100, 4, 64


def attention_case(kernel: tuple, fields: dict[str, Any]) -> Case:
    """Two entries; with lengths, the second has fewer keys."""
    (head_dim, v_head_dim), schedule = kernel
    given = dict(fields)
    group = given.pop("group", 1)
    right, left = given.pop("right", False), given.pop("left", False)
    case = Case(
        QUERIES,
        KEYS,
        heads=(group, 1),
        batch=2,
        dims=(head_dim, v_head_dim or head_dim),
        schedule=schedule,
        causal=right,
        window=(WINDOW if left else None, None),
        sink_tokens=FIRST if given.pop("sink_tokens", False) else 0,
        softcap=15.0 if given.pop("softcap", False) else 0.0,
        kv_lens=(KEYS, KEYS // 2) if given.pop("kv_lens", False) else None,
        q_offset=(KEYS // 3, KEYS // 4) if given.pop("q_offset", False) else None,
        q_lens=(QUERIES, QUERIES // 2) if given.pop("varlen_q", False) else None,
        k_lens=(KEYS, KEYS // 2) if given.pop("varlen_k", False) else None,
        rope_dim=given.pop("rope_dim", 0),
        pack_heads=group > 1,
    )
    return replace(case, **given)


def grouped_case(config: GroupedConfig) -> GroupedCase:
    """Experts: without rows, with a few, and with as many as the smallest tile."""
    form = (1.0, 0.0, 10.0 if config.limit else None) if config.swiglu else None
    return GroupedCase(
        (0, 3, 8),
        columns=config.tile_outputs + 64,
        fmt=config.fmt,
        granularity=config.granularity,
        form=form,
        out=config.out,
        per_token=config.row_scale,
        amax=config.amax,
        bias=config.bias,
        x_fmt=config.x_fmt,
        tile_rows=config.tile_rows,
        tile_n=config.tile_n,
        carry=config.carry,
        pdl=config.pdl,
    )


def _attend(case: Case) -> None:
    attention(*case.inputs(), **case.arguments())


def _multiply(case: GroupedCase) -> None:
    x, w = case.inputs()
    grouped_gemm(x, w, case.offsets, **case.options())


def _decode(case: Any, arch: str) -> None:
    decode(*case.inputs(), **case.options(), **case.launch_options(arch))


def _step(problem: Any) -> None:
    problem.peers[problem.ours](*problem.draw(0, "cpu"))


Parameter = Any  # pytest.param of a call and its architecture


def _named(family: str, name: object, call: Callable[[], None], arch: str) -> Parameter:
    """A parameter of a test; each family is one group of xdist, so families run in parallel."""
    group = pytest.mark.xdist_group(f"every config of {family}")
    return pytest.param(call, arch, id=f"{family}-{name}-{arch}", marks=group)


def attentions() -> Iterator[tuple[AttentionConfig, Case]]:
    """Yield every kernel and set of fields whose registers are tested, with a case."""
    for kernel, fields in itertools.product(attention_tables.KERNELS, attention_tables.ALL_FIELDS):
        yield attention_tables.config_of(kernel, fields), attention_case(kernel, fields)


def products() -> Iterator[tuple[GroupedConfig, GroupedCase]]:
    """Yield every tile, format and output, with a case."""
    for config in (*expert_tables.QUICK, *expert_tables.LONGER):
        yield config, grouped_case(config)


def reached() -> Iterator[tuple[object, Callable[[], None]]]:
    """Yield each config of a table with a call that should compile it."""
    for config, case in attentions():
        yield config, partial(_attend, case)
    for experts, product in products():
        yield experts, partial(_multiply, product)


def decodes() -> Iterator[Parameter]:
    """Yield the decodes of the pairwise array, on both architectures."""
    for case, arch in itertools.product(DECODES, ARCHS):
        yield _named("gqa", case, partial(_decode, case, arch), arch)


def steps() -> Iterator[Parameter]:
    """Yield the steps of the benchmarks, on both architectures."""
    for (family, (names, *_)), arch in itertools.product(FAMILIES.items(), ARCHS):
        emulated = [name for name in names if name not in NATIVE_ONLY]
        for problem in problems_of(family, emulated, (SMALL_ROWS,), SMALL_HIDDEN):
            name = str(problem).replace(" ", ".")
            yield _named(family, name, partial(_step, problem), arch)


EVERY = [
    *(_named("fmha", case, partial(_attend, case), "sm_100a") for _, case in attentions()),
    *decodes(),
    *(_named("moe", case, partial(_multiply, case), "sm_100a") for _, case in products()),
    *steps(),
]


pytestmark = [
    pytest.mark.skipif(not tools_found(), reason=HOW_TO_GET_TOOLS),
    pytest.mark.usefixtures("whole_ptxas"),
]


def cycles_of(recording: Recording) -> int:
    """Check that all warps are bound, to paths with the copies to shared memory that they executed,
    and return the cycles. The compiler merges other accesses, but not these.
    """
    bound = bind(recording)
    warps = [warp for number in bound.clusters for warp in bound.cluster(number)]
    assert len(warps) == len(recording.warps)
    for warp in warps:
        items = [bound.function.instructions[at] for at in warp.path.tolist()]
        copies = [not item.guard for item in items if item.word == "LDGSTS"]
        executed = sum(access.memory == COPIED for access in warp.record.accesses())
        assert sum(copies) <= executed <= len(copies)
    return LaunchModel(bound, for_arch(recording.arch)).predict().cycles


def test_the_problems_reach_the_tables():
    """Attention and products of experts have tables of configs; decodes and steps have tables of
    problems."""
    for config, call in reached():
        with collecting() as keys:
            call()
        assert [key.config for key in keys] == [config]


@pytest.mark.parametrize(("call", "arch"), EVERY)
def test_binds(call, arch):
    with emulation(Options(limit=None), arch=arch), watched(record=True) as report:
        call()
    recordings = [launch.recording for launch in report.launches if launch.recording.cubin]
    assert recordings
    for recording in recordings:
        assert cycles_of(recording) == cycles_of(recording) > 0
