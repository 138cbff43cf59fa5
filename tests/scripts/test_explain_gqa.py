"""`explain.py gqa`: its figures beside those of the plan and those worked out by hand."""

from __future__ import annotations

import re
import shlex

import pytest

from gqa_lowlatency import choose, launch
from gqa_lowlatency.api import fields_of
from gqa_lowlatency.arguments import Arguments
from gqa_lowlatency.config import DecodeConfig
from gqa_lowlatency.sm90.plan import Plan90
from gqa_lowlatency.sm100.plan import ROLES, make_plan
from workbench.cases import decode as _gqa_cases
from workbench.commands import EXPLAIN
from workbench.house.source import ROOT

LLAMA = "--kv-len 8192 --kv-heads 8 --q-heads 64"  # a group of 8 heads
EVERYTHING = (
    "--batch 2 --kv-len 40,3 --kv-heads 1 --q-heads 3 --q-len 2 --head-dim 64 --dtype fp16 "
    "--kv-dtype e4m3 --scales --out-dtype fp32 --page-size 8 --window 20 --sink-tokens 3 "
    "--softcap 4 --sinks --pdl --kv-ready-before-pdl --batch-invariant --owners 1 --stages 3"
)


@pytest.fixture
def explain(capsys):
    """explain('--kv-len 8192', arch) -> what it prints."""

    def explain(flags: str, arch: str = "sm_90a") -> str:
        assert EXPLAIN["gqa"].main("", [*flags.split(), "--arch", arch]) == 0
        return capsys.readouterr().out

    return explain


def rows_of(printed: str, title: str) -> dict[str, str]:
    """First cell -> the others, of the section under a title."""
    (section,) = [part for part in printed.split("\n\n") if part.startswith(title)]
    rows = (re.split(r"  +", line.strip(), maxsplit=1) for line in section.splitlines()[1:])
    return dict(rows)


def sharing(printed: str) -> dict[str, str]:
    return rows_of(printed, "How the CTAs share the work")


def test_eight_heads_of_a_kv_head_on_hopper(explain):
    printed = explain(LLAMA)
    assert printed.startswith(
        "gqa_lowlatency for sm_90a: head_dim 128, bf16, alone, cluster 8, warps 16"
    )
    assert "\nfor 1x8192 h64/8 b1 d128 bf16\n" in printed
    rows = sharing(printed)
    assert rows["grid"].startswith("8 x 8 x 1 = 64 CTAs for 132 SMs: ")
    assert rows["cluster"] == "8 CTAs for a KV head of an entry"
    assert rows["not wider"] == "8 CTAs are the most worth taking"
    assert rows["query rows"] == "8 of a KV head (8 heads x 1 token) in 8 columns"
    assert rows["owners"] == "8 of 8 CTAs finish O, 1 of its 8 columns each"
    assert rows["tile"] == "256 keys"  # 16 of each of 16 warps
    assert rows["1 x 8,192 keys"] == "32 tiles; CTA 0: 4 (0..3); CTA 7: 4 (28..31)"
    # K and V: 2 x 8192 keys x 8 heads x 128 x 2 bytes; Q: 64 heads x 128 x 2 bytes.
    assert rows["must read"] == "33,570,816 bytes: K and V 33,554,432, Q 16,384"
    assert rows["CTAs of an SM"].startswith("1 by shared memory; 1 by registers, ")
    assert rows["CTAs of an SM"].endswith(" at most 128")  # 65,536 of an SM for 512 threads


def test_eight_warps_take_tiles_of_128_keys(explain):
    printed = explain(f"{LLAMA} --warps 8 --stages 4")
    rows = sharing(printed)
    assert rows["tile"] == "128 keys"
    assert rows["1 x 8,192 keys"] == "64 tiles; CTA 0: 8 (0..7); CTA 7: 8 (56..63)"
    warps = rows_of(printed, "Warps: 8, 256 threads")
    assert warps["ring"].startswith("4 slots of 4,096 bytes")  # 16 keys x 128 x 2 bytes
    assert warps["Q"] == "in registers"
    assert rows["CTAs of an SM"].startswith("1 by shared memory")  # 8 x 4 x 4,096 and the mailbox
    shallow = sharing(explain(f"{LLAMA} --warps 8 --stages 2"))["CTAs of an SM"]
    assert shallow.startswith("3 by shared memory; 3 by registers")
    assert shallow.endswith(" at most 80")  # 65,536 / (3 x 256), a multiple of 8


def test_the_same_on_blackwell_and_all_that_its_plan_names(explain):
    printed = explain(LLAMA, "sm_100a")
    rows = sharing(printed)
    assert rows["grid"].startswith("16 x 8 x 1 = 128 CTAs for 148 SMs: ")
    assert rows["owners"] == "8 of 16 CTAs finish O, 1 of its 8 columns each"
    assert rows["1 x 8,192 keys"] == "64 tiles; CTA 0: 4 (0..3); CTA 15: 4 (60..63)"
    assert rows["CTAs of an SM"].startswith("1 by shared memory, 16 by tensor memory; 1 by ")
    plan, words = make_plan(DecodeConfig(cluster=16)), set(printed.replace(",", " ").split())
    names = [role.name for role in ROLES.roles] + [edge.name for edge in plan.edges.edges]
    names += [item.name for item in plan.tmem.ranges]
    names += [buffer.name for buffer in plan.smem.buffers if buffer.bytes]
    assert set(names) <= words
    assert f"Shared memory: {plan.smem.bytes:,} of 232,448 bytes" in printed
    assert "row_scales" not in words  # of e4m3 alone
    assert "row_scales" in explain(f"{LLAMA} --kv-dtype e4m3", "sm_100a")


@pytest.mark.parametrize("flags", [
    "", "--head-dim 64 --q-heads 128", "--head-dim 256 --kv-dtype e4m3",
    "--q-heads 64 --kv-heads 2 --warps 4 --owners 2",
])  # fmt: skip
def test_shared_memory_of_hopper_is_that_of_the_plan(explain, flags):
    printed = explain(flags)
    plan = Plan90(_gqa_cases.settled(_case(flags, "sm_90a"))[1])
    found = re.findall(r"\[ *([\d,]+), *([\d,]+)\)  (\w+)", printed)
    ranges = {n: tuple(int(x.replace(",", "")) for x in (b, e)) for b, e, n in found}
    assert f"Shared memory: {plan.smem_bytes:,} of" in printed
    assert ("queries" in ranges) == plan.queries_in_smem
    assert ("Q         in shared memory" in printed) == plan.queries_in_smem
    begins = {"statistics": plan.statistics_offset, "mail": plan.o_offset}
    begins |= {"rings": 0, "arrived": plan.barrier_offset}
    assert {name: ranges[name][0] for name in begins} == begins
    edges = [edge for pair in ranges.values() for edge in pair]
    assert edges[0] == 0
    assert edges[1:-1:2] == edges[2::2]  # each begins where the one before it ends
    assert edges[-1] == plan.smem_bytes


def _case(flags: str, arch: str):
    options = EXPLAIN["gqa"].parser("").parse_args(["--arch", arch, *flags.split()])
    return _gqa_cases.case_of(options)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("flags", ["", "--kv-len 200 --kv-heads 1 --q-heads 100", EVERYTHING])
def test_tensors_without_memory_give_the_config_of_real_ones(flags, arch):
    flags = flags if arch == "sm_90a" else flags.replace("--page-size 8", "--page-size 16")
    case = _case(flags, arch)
    options = {**case.tables, **case.options, "arch": arch, "backend": "emulate"}
    _, config = launch.prepare(Arguments(**fields_of(*case.tensors, options), **case.tuning))
    assert _gqa_cases.settled(case)[1] == config
    if flags:
        assert config != DecodeConfig(cluster=config.cluster)


def test_shares_of_a_window_with_first_keys(explain):
    """The last 602 of 9000 keys and the first 300, tiles of 128: 65 to 70, and 0 to 2."""
    flags = (
        "--batch 3 --kv-len 9000,100,0 --q-len 2 --window 600 --sink-tokens 300 --cluster 2 "
        "--warps 8"
    )
    rows = sharing(explain(flags))
    assert rows["1 x 9,000 keys"] == "9 tiles; CTA 0: 5 (0..2, 65..66); CTA 1: 4 (67..70)"
    assert rows["1 x 100 keys"] == "1 tile; CTA 0: 1 (0); CTA 1: none"
    assert rows["1 x 0 keys"] == "0 tiles; CTA 0: none; CTA 1: none"
    assert rows["not wider"] == "as asked"
    keys = 2 * (300 + 602 + 100) * 2 * 128 * 2  # K and V of 2 heads
    assert rows["must read"].startswith(f"{keys + 3 * 2 * 16 * 128 * 2:,} bytes: K and V {keys:,}")


def test_the_remainder_goes_to_the_low_ranks_and_long_lists_end(explain):
    rows = sharing(explain("--batch 11 --kv-len 1,2,3,4,5,6,7,8,9,9,770 --cluster 4 --warps 8"))
    assert rows["1 x 770 keys"] == "7 tiles; CTA 0: 2 (0..1); CTA 3: 1 (6)"
    assert rows["2 x 9 keys"] == "1 tile; CTA 0: 1 (0); CTA 3: none"
    assert rows["shorter"] == "2 more lengths"
    assert "1 x 3 keys" in rows
    assert "1 x 2 keys" not in rows


def test_row_tiles_read_keys_again(explain):
    """160 rows: 5 tiles of 32 columns in the registers of Hopper, 3 of 64 on Blackwell."""
    flags, once = "--kv-len 512 --kv-heads 2 --q-heads 160 --q-len 2", 2 * 512 * 2 * 128 * 2
    for arch, times, columns in (("sm_90a", 5, 32), ("sm_100a", 3, 64)):
        rows = sharing(explain(flags, arch))
        tiles = f"in {times} row tiles of {columns} columns"
        assert f"160 of a KV head (80 heads x 2 tokens) {tiles}" in rows["query rows"]
        assert rows["grid"].startswith(f"4 x {2 * times} x 1 = {8 * times} CTAs")
        again = f"each row tile reads K and V again, {times} times: {times * once:,} bytes"
        assert rows["must read"].endswith(again)


@pytest.mark.parametrize(("flags", "width", "reason"), [
    ("--kv-len 300", 2, "3 tiles of 128 keys"),
    ("--kv-len 4096 --batch 20", 2, "40 x 4 CTAs for 132 SMs"),
    ("--kv-len 4096 --batch 20 --batch-invariant", 8, "8 CTAs are the most worth taking"),
    ("--kv-len 129 --batch 66", 1, "132 x 2 CTAs for 132 SMs"),
    ("--kv-len 128 --batch 66", 1, "1 tile of 128 keys; 132 x 2 CTAs for 132 SMs"),
    ("--kv-len 4096 --cluster 16", 16, "as asked"),
])  # fmt: skip
def test_what_limits_the_cluster(explain, flags, width, reason):
    rows = sharing(explain(flags))
    assert rows["grid"].startswith(f"{width} x ")
    assert rows["not wider"] == reason
    assert rows["batch_invariant"].startswith("on" if "invariant" in flags else "off")


def test_a_gpu_that_runs_few_clusters_at_once(explain, monkeypatch):
    """One of eight CTAs to an SM at a time, two of four: 8 clusters end up with one CTA each."""
    monkeypatch.setattr(_gqa_cases, "native_arch", lambda: "sm_90a")
    monkeypatch.setattr(choose, "clusters_at_once", lambda device, ctas: 8 // ctas)
    rows = sharing(explain(LLAMA))
    assert rows["grid"].startswith("2 x 8 x 1")
    assert rows["not wider"] == "clusters that this GPU runs at once"
    assert sharing(explain(LLAMA, "sm_100a"))["grid"].startswith("16 x 8 x 1")


def test_clusters_that_share_a_kv_head(explain):
    """Workspace: 8 owners of 16 clusters leave a column of O, a maximum and a sum; 8 counts."""
    rows = sharing(explain("--kv-len 65536 --kv-heads 1 --q-heads 8"))
    assert rows["grid"].startswith("128 x 1 x 1 = 128 CTAs")
    room = 8 * 16 * (128 + 2) * 4 + 8 * 4
    assert rows["cluster"] == (
        "8 CTAs for a KV head of an entry, with 15 clusters more; the last to arrive merges what "
        f"all left in {room:,} bytes of workspace"
    )
    assert rows["1 x 65,536 keys"] == "256 tiles; CTA 0: 2 (0..1); CTA 127: 2 (254..255)"
    rows = sharing(explain("--kv-len 2048 --kv-heads 1 --q-heads 8 --cluster 4 --parts 2"))
    assert rows["grid"].startswith("8 x 1 x 1")
    assert "with 1 cluster more" in rows["cluster"]


@pytest.mark.parametrize("flags", ["--batch 0", "--kv-len 0", "--batch 2 --kv-len 0,0"])
def test_no_keys_no_launch(explain, flags):
    assert explain(flags).endswith("\nNo keys: no launch.\n")


@pytest.mark.parametrize(("flags", "words"), [
    ("--head-dim 96", "head_dim 96: supported are (64, 128, 256)"),
    ("--cluster 3", "cluster 3"),
    ("--batch 3 --kv-len 5,6", "one length, or as many"),
    ("--sink-tokens 4", "without a left window"),
    ("--page-size 48", "pages of 48 rows: a divisor of 128"),
    ("--page-size 0 --kv-ready-before-pdl", "without pdl"),
    ("--arch sm_90a --stages 1", "stages 1: at least 2"),
    ("--arch sm_90a --head-dim 256 --q-heads 128 --max-columns 64", "64 columns of head_dim 256"),
    ("--head-dim 64 --kv-dtype e4m3 --page-size 1", "page_size 1 on sm_100a with 64 bytes"),
    ("--stages 9", "bytes of shared memory"),
    ("--kv-heads 40000 --q-heads 6400000", "limit 65535 (grid dimension)"),
    ("--scales", "only e4m3 is scaled"),
    ("--parts 65", "65 parts: from 1 to 64"),
])  # fmt: skip
def test_refusals_name_value_and_limit(capsys, flags, words):
    assert EXPLAIN["gqa"].main("", flags.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("refused: ")
    assert words in err


def test_the_command_line_takes_a_kernel_and_hands_its_flags_on(run):
    result = run("explain.py", "gqa", "--cluster", "3")
    assert result.returncode == 2
    assert result.stderr.startswith("refused: cluster 3")


def test_the_readme_spells_commands_that_there_are():
    readme = (ROOT / "gqa_lowlatency" / "README.md").read_text(encoding="utf-8")
    found = re.findall(
        r"^    python scripts/(explain|dump)\.py gqa ([^#\n]*)", readme, re.MULTILINE
    )
    assert [name for name, _ in found] == ["explain", "dump"]
    for _, flags in found:
        assert _case(" ".join(shlex.split(flags)), "sm_90a").kv_len == (8192,)
