"""`explain.py`: its figures compared with those of the plan and those by hand."""

from __future__ import annotations

import math
import re

import pytest

from fmha import plan as fmha_plan
from fmha.config import AttentionConfig
from gqa_lowlatency import choose, launch
from gqa_lowlatency.api import fields_of
from gqa_lowlatency.arguments import Arguments
from gqa_lowlatency.config import DecodeConfig
from gqa_lowlatency.portable.plan import PortablePlan
from gqa_lowlatency.sm100 import plan as decode_plan
from lab.commands import EXPLAIN
from lab.problems import gqa as decode_cases
from lab.problems import mla as latent_cases
from lab.problems.moe import layer_of
from mla.attention.portable.plan import PortablePlan as LatentPlan
from mla.attention.sm90.plan import Plan90
from moe.launch import grid
from moe.sm100 import plan as moe_plan

LLAMA = "--kv-len 8192 --kv-heads 8 --q-heads 64"  # a group of 8 heads
EVERYTHING = (
    "--batch 2 --kv-len 40,3 --kv-heads 1 --q-heads 3 --q-len 2 --head-dim 64 --dtype fp16 "
    "--kv-dtype e4m3 --scales --out-dtype fp32 --page-size 8 --window 20 --sink-tokens 3 "
    "--softcap 4 --sinks --pdl --kv-ready-before-pdl --batch-invariant --owners 1 --stages 3"
)


def product(flags: str, name: str = "w13") -> object:
    return layer_of(EXPLAIN["moe"].parser("").parse_args(flags.split())).product(name)


def rows_of(text: str, title: str) -> dict[str, str]:
    """First cell -> the other cells, of the section under a title."""
    (section,) = [part for part in text.split("\n\n") if part.startswith(title)]
    rows = (re.split(r"  +", line.strip(), maxsplit=1) for line in section.splitlines()[1:])
    return dict(rows)


@pytest.mark.parametrize(("command", "plan", "roles"), [
    ("fmha --head-dim 128 --causal --k-stages 2",
     lambda: fmha_plan.make_plan(AttentionConfig(128, right=True, k_stages=2)),
     None),
    (f"gqa {LLAMA}", lambda: decode_plan.make_plan(DecodeConfig(cluster=16)), decode_plan.ROLES),
    *((f"moe --tokens 8 --tile-rows {n}",
       lambda n=n: moe_plan.make_plan(product(f"--tokens 8 --tile-rows {n}").config),
       moe_plan.ROLES)
      for n in (8, 32, 128, 256)),
])  # fmt: skip
def test_all_that_a_plan_names_is_there(printed, command, plan, roles):
    text, plan = printed(f"explain.py {command}"), plan()
    names = {role.name for role in (roles or plan.roles).roles}
    names |= {edge.name for edge in plan.edges.edges} | {item.name for item in plan.tmem.ranges}
    names |= {buffer.name for buffer in plan.smem.buffers if buffer.bytes}
    assert names <= set(text.replace(",", " ").split())
    assert f"Shared memory: {plan.smem.bytes:,} of 232,448 bytes" in text


def test_a_step_is_explained_by_its_kernels_and_their_plans(printed):
    out = printed("explain.py score --rows 2")
    assert "mla.indexer.sm100.signature for sm_100a: " in out
    assert "Tensor memory: " in out
    assert "mla.indexer.scores_kernel for sm_100a: record indexer_fp8" in out
    out = printed("explain.py score --rows 2 --arch sm_90a")
    assert "mla.indexer.sm90.kernel for sm_90a: record indexer_fp8" in out
    assert "mla.indexer.scores_kernel for sm_90a: record indexer_fp4" in out


@pytest.mark.parametrize("flags", [
    "gqa --batch 0", "gqa --kv-len 0", "gqa --batch 2 --kv-len 0,0", "moe --tokens 0",
])  # fmt: skip
def test_nothing_to_do_is_no_launch(printed, flags):
    what = "rows" if "moe" in flags else "keys"
    assert printed(f"explain.py {flags}").endswith(f"\nNo {what}: no launch.\n")


# -- decode ---------------------------------------------------------------------------------------


@pytest.fixture
def explain(printed):
    """explain('--kv-len 8192', arch): its text for a decode case."""
    return lambda flags, arch="sm_90a": printed(f"explain.py gqa {flags} --arch {arch}")


@pytest.fixture
def sharing(explain):
    return lambda *case: rows_of(explain(*case), "How the CTAs share the work")


def case_of(flags: str, arch: str):
    options = EXPLAIN["gqa"].parser("").parse_args(["--arch", arch, *flags.split()])
    return decode_cases.case_of(options)


def test_eight_heads_of_a_kv_head_on_hopper(explain, sharing):
    text, rows = explain(LLAMA), sharing(LLAMA)
    assert text.startswith(
        "gqa_lowlatency for sm_90a: head_dim 128, bf16, alone, cluster 8, warps 16"
    )
    assert "\nfor 1x8192 h64/8 b1 d128 bf16\n" in text
    assert rows["grid"].startswith("8 x 8 x 1 = 64 CTAs for 132 SMs: ")
    assert rows["cluster"] == "8 CTAs for a KV head of an entry"
    assert rows["not wider"] == "8 CTAs are the most that pay off"
    assert rows["query rows"] == "8 of a KV head (8 heads x 1 token) in 8 columns"
    assert rows["owners"] == "8 of 8 CTAs finish O, 1 of its 8 columns each"
    assert rows["tile"] == "256 keys"  # 16 keys for each of 16 warps
    assert rows["1 x 8,192 keys"] == "32 tiles; CTA 0: 4 (0..3); CTA 7: 4 (28..31)"
    # K and V: 2 x 8192 keys x 8 heads x 128 x 2 bytes; Q: 64 heads x 128 x 2 bytes.
    assert rows["must read"] == "33,570,816 bytes: K and V 33,554,432, Q 16,384"
    assert rows["CTAs of an SM"].startswith("1 by shared memory; 1 by registers, ")
    assert rows["CTAs of an SM"].endswith(" at most 128")  # 65,536 of an SM for 512 threads


def test_eight_warps_take_tiles_of_128_keys(explain, sharing):
    flags = f"{LLAMA} --warps 8 --stages"
    rows = sharing(f"{flags} 4")
    assert rows["tile"] == "128 keys"
    assert rows["1 x 8,192 keys"] == "64 tiles; CTA 0: 8 (0..7); CTA 7: 8 (56..63)"
    warps = rows_of(explain(f"{flags} 4"), "Warps: 8, 256 threads")
    assert warps["ring"].startswith("4 slots of 4,096 bytes")  # 16 keys x 128 x 2 bytes
    assert warps["Q"] == "in registers"
    assert rows["CTAs of an SM"].startswith("1 by shared memory")  # 8 x 4 x 4,096 and the mailbox
    shallow = sharing(f"{flags} 2")["CTAs of an SM"]
    assert shallow.startswith("3 by shared memory; 3 by registers")
    assert shallow.endswith(" at most 80")  # 65,536 / (3 x 256), a multiple of 8


def test_the_same_on_blackwell(explain, sharing):
    rows = sharing(LLAMA, "sm_100a")
    assert rows["grid"].startswith("16 x 8 x 1 = 128 CTAs for 148 SMs: ")
    assert rows["owners"] == "8 of 16 CTAs finish O, 1 of its 8 columns each"
    assert rows["1 x 8,192 keys"] == "64 tiles; CTA 0: 4 (0..3); CTA 15: 4 (60..63)"
    assert rows["CTAs of an SM"].startswith("1 by shared memory, 16 by tensor memory; 1 by ")
    assert "row_scales" not in explain(LLAMA, "sm_100a")  # used for e4m3 only
    assert "row_scales" in explain(f"{LLAMA} --kv-dtype e4m3", "sm_100a")


def test_the_same_without_clusters(explain, sharing):
    rows = sharing(LLAMA, "sm_89")
    assert rows["grid"].startswith("16 x 8 x 1 = 128 CTAs for 128 SMs: ")
    assert rows["cluster"].startswith("1 CTA for a KV head of an entry, with 15 clusters more; ")
    assert rows["not wider"] == "on this GPU only parts split keys over CTAs"
    assert rows["CTAs of an SM"].startswith("1 by shared memory")  # two slots for each of 8 warps
    assert "of 101,376 bytes" in explain(LLAMA, "sm_89")
    assert "of 166,912 bytes" in explain(LLAMA, "sm_80")


@pytest.mark.parametrize("flags", [
    "", "--head-dim 64 --q-heads 128", "--head-dim 256 --kv-dtype e4m3",
    "--q-heads 64 --kv-heads 2 --warps 4 --owners 2",
])  # fmt: skip
def test_shared_memory_of_hopper_is_that_of_the_plan(explain, flags):
    text = explain(flags)
    plan = PortablePlan(decode_cases.settled(case_of(flags, "sm_90a"))[1])
    found = re.findall(r"\[ *([\d,]+), *([\d,]+)\)  (\w+)", text)
    ranges = {n: tuple(int(x.replace(",", "")) for x in (b, e)) for b, e, n in found}
    assert f"Shared memory: {plan.smem_bytes:,} of" in text
    assert ("queries" in ranges) == plan.queries_in_smem
    assert ("Q         in shared memory" in text) == plan.queries_in_smem
    offsets = plan.smem.offsets()
    assert all(ranges[name][0] == offsets[name][0] for name in ranges)
    edges = [edge for pair in ranges.values() for edge in pair]
    assert edges[0] == 0
    assert edges[1:-1:2] == edges[2::2]  # each begins where the one before it ends
    assert edges[-1] == plan.smem_bytes


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("flags", ["", "--kv-len 200 --kv-heads 1 --q-heads 100", EVERYTHING])
def test_tensors_without_memory_give_the_config_of_real_ones(flags, arch):
    flags = flags if arch == "sm_90a" else flags.replace("--page-size 8", "--page-size 16")
    case = case_of(flags, arch)
    options = {**case.tables, **case.options, "arch": arch, "backend": "emulate"}
    *_, decision = launch.prepare(Arguments(**fields_of(*case.tensors, options), **case.tuning))
    config = decision.config
    assert decode_cases.settled(case)[1] == config
    if flags:
        assert config != DecodeConfig(cluster=config.cluster)


def test_shares_of_a_window_with_first_keys(sharing):
    """The last 602 of 9000 keys and the first 300, in tiles of 128: tiles 65 to 70, and 0 to 2."""
    rows = sharing(
        "--batch 3 --kv-len 9000,100,0 --q-len 2 --window 600 --sink-tokens 300 --cluster 2 "
        "--warps 8"
    )
    assert rows["1 x 9,000 keys"] == "9 tiles; CTA 0: 5 (0..2, 65..66); CTA 1: 4 (67..70)"
    assert rows["1 x 100 keys"] == "1 tile; CTA 0: 1 (0); CTA 1: none"
    assert rows["1 x 0 keys"] == "0 tiles; CTA 0: none; CTA 1: none"
    assert rows["not wider"] == "as asked"
    keys = 2 * (300 + 602 + 100) * 2 * 128 * 2  # K and V of 2 heads
    assert rows["must read"].startswith(f"{keys + 3 * 2 * 16 * 128 * 2:,} bytes: K and V {keys:,}")


def test_the_remainder_goes_to_the_low_ranks_and_long_lists_end(sharing):
    rows = sharing("--batch 11 --kv-len 1,2,3,4,5,6,7,8,9,9,770 --cluster 4 --warps 8")
    assert rows["1 x 770 keys"] == "7 tiles; CTA 0: 2 (0..1); CTA 3: 1 (6)"
    assert rows["2 x 9 keys"] == "1 tile; CTA 0: 1 (0); CTA 3: none"
    assert rows["shorter"] == "2 more lengths"
    assert "1 x 3 keys" in rows
    assert "1 x 2 keys" not in rows


@pytest.mark.parametrize(("arch", "times", "columns"), [("sm_90a", 5, 32), ("sm_100a", 3, 64)])
def test_row_tiles_read_keys_again(sharing, arch, times, columns):
    """160 rows: 5 tiles of 32 columns, held in Hopper's registers, or 3 of 64 on Blackwell."""
    rows, once = sharing("--kv-len 512 --kv-heads 2 --q-heads 160 --q-len 2", arch), 1 << 18
    tiles = f"in {times} row tiles of {columns} columns"
    assert f"160 of a KV head (80 heads x 2 tokens) {tiles}" in rows["query rows"]
    assert rows["grid"].startswith(f"4 x {2 * times} x 1 = {8 * times} CTAs")
    again = f"each row tile reads K and V again, {times} times: {times * 2 * once:,} bytes"
    assert rows["must read"].endswith(again)


@pytest.mark.parametrize(("flags", "width", "reason"), [
    ("--kv-len 300", 2, "3 tiles of 128 keys"),
    ("--kv-len 4096 --batch 20", 2, "40 x 4 CTAs for 132 SMs"),
    ("--kv-len 4096 --batch 20 --batch-invariant", 8, "8 CTAs are the most that pay off"),
    ("--kv-len 129 --batch 66", 1, "132 x 2 CTAs for 132 SMs"),
    ("--kv-len 128 --batch 66", 1, "1 tile of 128 keys; 132 x 2 CTAs for 132 SMs"),
    ("--kv-len 4096 --cluster 16", 16, "as asked"),
])  # fmt: skip
def test_what_limits_the_cluster(sharing, flags, width, reason):
    rows = sharing(flags)
    assert rows["grid"].startswith(f"{width} x ")
    assert rows["not wider"] == reason
    assert rows["batch_invariant"].startswith("on" if "invariant" in flags else "off")


def test_a_gpu_that_runs_few_clusters_at_once(sharing, monkeypatch):
    """An SM runs one cluster of eight CTAs at a time, or two of four: 8 clusters get one CTA
    each."""
    monkeypatch.setattr(decode_cases, "native_arch", lambda: "sm_90a")
    monkeypatch.setattr(choose, "clusters_at_once", lambda device, ctas: 8 // ctas)
    rows = sharing(LLAMA)
    assert rows["grid"].startswith("2 x 8 x 1")
    assert rows["not wider"] == "limit of clusters that this GPU runs at once"
    assert sharing(LLAMA, "sm_100a")["grid"].startswith("16 x 8 x 1")


def test_clusters_that_share_a_kv_head(sharing):
    """Workspace: each of 8 owners in 16 clusters leaves a column of O, a maximum and a sum; 8
    counts."""
    rows = sharing("--kv-len 65536 --kv-heads 1 --q-heads 8")
    assert rows["grid"].startswith("128 x 1 x 1 = 128 CTAs")
    room = 8 * 16 * (128 + 2) * 4 + 8 * 4
    assert rows["cluster"] == (
        "8 CTAs for a KV head of an entry, with 15 clusters more; the last to arrive merges the "
        f"parts in {room:,} bytes of workspace"
    )
    assert rows["1 x 65,536 keys"] == "256 tiles; CTA 0: 2 (0..1); CTA 127: 2 (254..255)"
    rows = sharing("--kv-len 2048 --kv-heads 1 --q-heads 8 --cluster 4 --parts 2")
    assert rows["grid"].startswith("8 x 1 x 1")
    assert "with 1 cluster more" in rows["cluster"]


# -- experts --------------------------------------------------------------------------------------


@pytest.fixture
def walk(printed):
    """Return the section 'The walk over tiles' for these flags."""
    return lambda flags: rows_of(printed(f"explain.py moe {flags}"), "The walk over tiles")


@pytest.mark.parametrize("tile_rows", [8, 32, 128, 256])
def test_tile_and_ring_are_those_of_the_plan(walk, tile_rows):
    flags = f"--tokens 8 --tile-rows {tile_rows}"
    rows = walk(flags)
    assert rows["ring"] == f"{moe_plan.make_plan(product(flags).config).stages} stages"
    assert rows["tile"].startswith(f"{tile_rows} rows of an expert x ")


def test_figures_of_experts_by_hand(printed):
    """40 tokens with 2 of 6 experts: 80 rows, 256 packed columns; K = 256 is one stage of e2m1."""
    text = printed("explain.py moe --tokens 40 --tile-rows 64 --activation deepseek-v4")
    assert text.startswith("moe grouped GEMM for sm_100a: nvfp4, ")
    assert "\nproduct with w13 of T40 H256 I128 E6 k2 nvfp4 " in text
    rows = rows_of(text, "The walk over tiles")
    assert rows["product"] == "[80, 256] sorted by expert x 6 x [256, 256]"
    assert rows["output"] == (
        "[80, 128] in nvfp4, SwiGLU of pairs: 32 rows of gate, then of up, clamped at 10"
    )
    assert "13.3 rows per expert on average, at most 40" in rows["tile"]
    # One tile per expert: none has more than 40 rows.
    assert rows["tiles"] == ("2 of columns x at most 6 of rows, for any counts; at least 2 of rows")
    assert rows["grid"].startswith("12 CTAs on 148 SMs, ")
    assert rows["K"] == "1 stage of 256, 128 bytes, 64 per MMA"
    assert rows["last stage"] == "256 elements of K, 4 MMAs"
    # 256 rows of 128 bytes, one factor per block of 16, and two global scales.
    assert rows["weights"] == "36,872 bytes per expert, 221,232 if 6 have rows"
    factors = rows_of(text, "Scale factors")
    assert factors["output"] == "at most 6 blocks of 2 atoms, as those of x"
    assert factors["x"].startswith("at most 6 blocks of 128 rows, 4 atoms each; ")
    assert factors["w"] == "2 blocks per expert, 4 atoms each"


def test_a_tail_of_k_and_a_pair_of_ctas(walk):
    """K = 2880 is 11 stages of 256 and a quarter."""
    flags = "--model gpt-oss-120b --tokens 4096 --experts 4 --top-k 1 --tile-rows 256"
    rows, arguments = walk(f"{flags} --product w2"), product(flags, "w2")
    assert rows["last stage"] == "64 elements of K, 1 MMA"
    assert rows["K"].startswith("12 stages of 256, ")
    assert rows["output"].startswith("[4096, 2880] in bf16")
    assert "a pair of CTAs" in rows["tile"]
    columns = math.ceil(2880 / arguments.config.tile_n)
    # 4096 rows of 4 experts: 16 tiles of 256, and 3 more if no expert has a multiple of 256.
    assert rows["tiles"].startswith(f"{columns} of columns x at most 19 of rows")
    assert grid(arguments) == 148
    assert rows["grid"].startswith("148 CTAs in 74 clusters of 2 on 148 SMs, ")


def test_what_is_chosen_and_what_would_be(walk):
    assert "would choose" not in walk("--tokens 40")["tile"]
    assert "which would choose 64" in walk("--tokens 40 --tile-rows 128")["tile"]


def test_columns_and_carry_are_those_of_the_flags(printed):
    flags = "--tokens 600 --tile-rows 256 --tile-n 256 --carry --granularity 8"
    text = printed(f"explain.py moe {flags}")
    assert {"carry", "tile_rows 256", "tile_n 256"} <= set(text.splitlines()[0].split(", "))
    tile = rows_of(text, "The walk over tiles")["tile"]
    assert tile.startswith("256 rows of an expert x 256 rows of its matrix, a pair ")


def test_which_blocks_a_cta_computes(printed):
    """65,536 tokens of eight heads, in blocks of 2 x 16 tokens: 2,048 for each of eight KV
    heads."""
    text = printed(f"explain.py fmha --q-len 64k {LLAMA} --head-dim 64 --causal --window 127")
    rows = rows_of(text, "Query blocks")
    assert rows["a block"] == "2 tiles of 16 tokens x 8 heads that share keys"
    assert rows["all blocks"].startswith("2048 per KV head x 8 KV heads")
    assert rows["launched"].startswith("148 CTAs of 148")
    assert rows["launched"].endswith("110 or 111 blocks each")
    assert rows["key tiles"].startswith("80 keys")
    text = printed("explain.py fmha --head-dim 256 --q-len 1k --q-heads 3 --causal")
    rows = rows_of(text, "Query blocks")
    assert rows["launched"] == "12 pairs of CTAs of 74 that a B200 runs at once; 1 block each"
    assert rows["order"] == "the longest of all 3 heads first"


@pytest.mark.parametrize(("flags", "plan"), [
    ("--kv-len 500 --heads 128 --kernel wgmma --arch sm_90a", Plan90),
    ("--operation sparse_decode --rope --extra fp4_288 --kernel wgmma --arch sm_90a", Plan90),
    ("--e4m3 --sinks --arch sm_89", LatentPlan),
])  # fmt: skip
def test_the_plan_of_latent_keys(printed, flags, plan):
    case = latent_cases.case_of(EXPLAIN["mla"].parser("").parse_args(flags.split()))
    decision = case.decision
    found = latent_cases.plan_for(decision.config, decision.kernel, case.arch)
    assert isinstance(found, plan)
    text = printed(f"explain.py mla {flags}")
    names = {role.name for role in found.roles.roles}
    names |= {edge.name for edge in found.edges.edges} if plan is Plan90 else set()
    names |= {buffer.name for buffer in found.smem.buffers if buffer.bytes}
    assert names <= set(text.split())
    assert f"Launch: {decision.grid} CTAs" in text
    assert f"Shared memory: {found.smem.bytes:,} of" in text


def test_flags_of_another_operation_are_refused(run):
    done = run("explain.py mla --rope")
    assert done.returncode == 2
    assert "--extra and --rope belong to" in done.stderr
