"""Compiled code of the kernel, launches that the host requests, and boxes that TMA fetches.

Text facts are read from the PTX; the launch is intercepted before it runs; boxes are counted by the
emulator and compared with tiles counted from the definition of visibility.
"""

from __future__ import annotations

import dataclasses
import re

import pytest

import ptxemu
from fmha.config import EXP2_PAIRS, AttentionConfig
from fmha.launch import compile_attention
from fmha.plan import make_plan
from fmha.reference import Options, visible_keys
from fmha.shared.load import k_box, q_box, v_box
from fmha.sm100.plan import Plan
from kernelkit.plan import hw
from lab.problems import attention as cases
from lab.problems.attention import Case
from ptxemu.host.engine import host_program

# Causal: since at most one tile is masked, the compiler peels that loop and drops dead code.
CONFIGS = {
    "base": AttentionConfig(right=True, schedule="base"),
    "pingpong": AttentionConfig(right=True, kv_lens=True, schedule="pingpong"),
    "P in parts": AttentionConfig(head_dim=128, right=True, schedule="pingpong"),
    "pair": AttentionConfig(head_dim=256, right=True),
    "pair of halves": AttentionConfig(head_dim=512, right=True),
}
# For each config at least one case runs on the same compiled kernel, or nearly.
LAUNCHES = {
    "base": Case(130, 300, (2, 1), 2, causal=True, pack_heads=False, schedule="base"),
    "pingpong": Case(300, 200, kv_lens=(190,), causal=True, schedule="pingpong"),
    "pair": Case(300, 140, causal=True, dims=(256, 256)),
    "pair of halves": Case(130, 140, causal=True, dims=(512, 512)),
}
SKIPS = Case(300, 2000, causal=True, window=(200, None), sink_tokens=4, schedule="base", tile_n=128)
LOADS = (
    *LAUNCHES.values(),
    SKIPS,
    dataclasses.replace(SKIPS, sink_tokens=300),
    dataclasses.replace(SKIPS, schedule="pingpong"),
    dataclasses.replace(SKIPS, tile_n=80),
    dataclasses.replace(SKIPS, q_offset=600),
    Case(9, 300, (6, 2), 2, page_size=16, kv_lens=(300, 40), pack_heads=True, schedule="base"),
    dataclasses.replace(SKIPS, page_size=32, kv_lens=(1999,), heads=(6, 2), pack_heads=True),
    Case(0, 0, (2, 1), q_lens=(200, 3), k_lens=(400, 140), causal=True, schedule="base"),
    dataclasses.replace(SKIPS, sink_tokens=0),
)


def count(text: str, pattern: str) -> int:
    return len(re.findall(pattern, text))


@pytest.fixture(params=CONFIGS)
def config(request) -> AttentionConfig:
    return CONFIGS[request.param]


@pytest.fixture
def ptx(config) -> str:
    return compile_attention(config).ptx


@pytest.fixture
def plan(config) -> Plan:
    return make_plan(config)


def test_products_are_issued_once_in_the_text(plan, ptx):
    """Products are issued in blocks of K = 16: S with A from shared memory (a descriptor), O with A
    from P's memory."""
    layout = plan.layout
    s = layout.k_columns // 16 * layout.q_tiles  # once for all pieces of K
    o = layout.tile_n // 16 * layout.v_pieces * layout.q_tiles
    described = count(ptx, r"tcgen05\.mma\S+\s+\[%r\d+\], %rd")
    addressed = count(ptx, r"tcgen05\.mma\S+\s+\[%r\d+\], \[%r")
    assert (described, addressed) == ((s + o, 0) if layout.p_in_smem else (s, o))


def test_copies_of_the_softmax_loop(plan, ptx):
    """The shrink is one more exponential; a pair computed by polynomial takes four FMAs instead of
    two."""
    copies = copies_of_a_tile(plan)
    columns = plan.layout.lane_columns
    others = columns // 2 * plan.layout.exp2_share // EXP2_PAIRS
    assert count(ptx, r"ex2\.approx") == copies * (columns - 2 * others + 1)
    assert count(ptx, r"fma\.rn\.f32x2") == copies * (columns // 2 + 4 * others)
    assert count(ptx, r"cvt\.rn\.bf16x2\.f32") >= copies * columns // 2


def test_every_barrier_of_the_plan_is_initialised(plan, ptx):
    assert count(ptx, r"mbarrier\.init") == sum(edge.barriers for edge in plan.edges.edges)


def test_registers_move_as_the_plan_says_and_none_spill(plan, ptx):
    moved = re.findall(r"setmaxnreg\.(?:inc|dec)\S*\s+(\d+);", ptx)
    assert sorted(map(int, moved)) == sorted(role.registers for role in plan.roles.roles)
    assert ".local" not in ptx


def test_p_is_published_before_the_row_sum(plan, ptx):
    """The packed additions of the row sum come after the arrival that signals P, in both loops.

    ptxas may still reorder them; test_static_sass.py checks its result.
    """
    arrivals = re.finditer(
        r"before_thread_sync;(?:(?!mbarrier|tcgen05)[\s\S])*?(mbarrier\.arrive\.shared\S*b64)", ptx
    )
    behind = [count(ptx[m.end() : ptx.index("@%p", m.end())], r"add\S*f32x2") for m in arrivals]
    told = sum(sums >= plan.layout.lane_columns // 2 for sums in behind)
    assert told == copies_of_a_tile(plan) * len(plan.layout.p_columns)


def copies_of_a_tile(plan) -> int:
    """There are two loops; if P has fewer exponents than fp32, each has a copy for warps with far
    rows."""
    return 2 if plan.config.softcap or plan.config.keys_dtype == "bf16" else 4


def requests_of(case: Case, monkeypatch) -> list:
    """Return the launches that the host requests, without running them."""
    found = []

    def take(code, pointers, options=None):
        host_program(code).call(pointers, found.append)

    with monkeypatch.context() as patch:
        patch.setattr(ptxemu, "run_host", take)
        patch.setattr("fmha.launch.sms_of", lambda device: hw.SMS)
        patch.setattr("fmha.launch.clusters_at_once", lambda device, ctas: hw.SMS // ctas)
        cases.run_reported(case, "round-robin")
    return found


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_launch_asks_for_what_the_plan_says(name, monkeypatch):
    case, plan = LAUNCHES[name], plan_of(LAUNCHES[name])
    (request,) = requests_of(case, monkeypatch)
    assert request.smem_bytes == plan.smem.bytes
    assert request.block == (plan.roles.threads, 1, 1)
    assert (request.cluster or (1, 1, 1)) == (plan.layout.ctas, 1, 1)
    blocks = plan.layout.blocks(case.sq) * case.heads[0] * case.batch
    assert request.grid == (blocks * plan.layout.ctas, 1, 1)


def test_no_more_ctas_are_asked_for_than_run_at_once(monkeypatch):
    """A B200 does not run 50 heads of three blocks each at once."""
    (request,) = requests_of(Case(300, 20, (50, 1), pack_heads=False, schedule="base"), monkeypatch)
    assert request.grid == (hw.SMS, 1, 1)
    (request,) = requests_of(Case(600, 20, (50, 1), dims=(256, 256), pack_heads=False), monkeypatch)
    assert request.grid == (hw.SMS, 1, 1)


@pytest.mark.parametrize("case", LOADS, ids=str)
def test_tma_fetches_tiles_that_a_row_sees_and_no_others(case):
    """The emulator's counter of boxes: boxes of Q per block, boxes of K and V per visible tile."""
    plan = plan_of(case)
    results, reports = cases.run_reported(case, "round-robin")
    ((report,),) = (report.launches for report in reports)
    assert all(verdict.ok for verdict in cases.judge(case, results))
    tiles = visible_tiles(case, plan)
    layout, config = plan.layout, plan.config
    q, k, v = q_box(plan), k_box(plan), v_box(plan)
    of_q = layout.q_tiles * config.head_dim // q.columns * sum(count > 0 for count in tiles)
    of_tile = layout.k_rows // k.rows * (config.head_dim // k.columns)
    of_tile += layout.tile_n // v.rows * layout.v_pieces * (layout.v_columns // v.columns)
    heads = case.heads[0] // config.group
    expected = (of_q + of_tile * sum(tiles)) * heads * layout.ctas
    assert report.counts["tma.load"] == expected


def test_a_window_skips_most_tiles():
    """The cases above do skip tiles: three blocks read few of the 16 key tiles."""
    plan = plan_of(SKIPS)
    assert visible_tiles(SKIPS, plan) == [4, 4, 3]
    without_window = dataclasses.replace(SKIPS, window=(None, None), sink_tokens=0)
    assert visible_tiles(without_window, plan) == [15, 16, 16]


def plan_of(case: Case) -> Plan:
    """Return the plan for the schedule and layout of `case`."""
    return make_plan(
        AttentionConfig(
            head_dim=case.dims[0],
            tile_n=case.tile_n,
            schedule=case.schedule,
            kv_lens=case.kv_lens is not None,
            varlen_q=case.q_lens is not None,
            varlen_k=case.k_lens is not None,
            page_size=case.page_size,
            group=case.heads[0] // case.heads[1] if case.pack_heads else 1,
            right=case.causal,
            left=case.window[0] is not None,
        )
    )


def visible_tiles(case: Case, plan: Plan) -> list[int]:
    """Number of key tiles that each block of rows of each entry reads: from the first key that a
    row sees (sink tokens aside), or from the first of the page, without a gap."""
    windows = {name: getattr(case, name) for name in ("causal", "window", "q_offset")}
    layout, tile_n = plan.layout, plan.layout.tile_n
    found = []
    for n_q, n_k, offset in zip(case.queries, case.keys, case.offsets, strict=True):
        visible = visible_keys(n_q, n_k, offset, Options(**windows))
        for rows in visible.split(layout.box_tokens * layout.block_tiles):
            keys = rows.any(dim=0).nonzero().flatten().tolist()
            end = keys[-1] + 1 if keys else 0
            origin = keys[0] // layout.key_step * layout.key_step if keys else 0
            sink = -(-min(case.sink_tokens, end) // tile_n)
            if sink * tile_n > origin:
                origin = sink = 0
            found.append(sink + -(-(end - origin) // tile_n))
    return found
