"""Findings as text and as JSON: merged, ordered, with roles, places and missing instructions."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ptxemu
from ptxemu.check.text import describe, document, render, roles_of, verdict
from ptxemu.findings import Access, Finding
from ptxemu.machine import machine
from ptxemu.report import LaunchReport, Report
from tests.ptxemu.kernels import kernel, launch

OPCODES = {
    0: Counter({"tcgen05.ld.sync.aligned.32x32b.x32.b32": 4, "st.global.v4.b32": 2}),
    4: Counter({"tcgen05.mma.cta_group::1.kind::f16": 8, "mbarrier.try_wait.parity.b64": 3}),
    5: Counter({"cp.async.bulk.tensor.2d.shared::cta.global.tile": 2}),
}
WRITE = Access(
    agent="warp 0 of cta(0,0,0)",
    role="st.shared.v4.b32",
    what="write",
    space="shared memory of cta(0,0,0)",
    first=0x400,
    last=0x40F,
    line=40,
    text="st.shared.v4.b32 [%r3], {%r1, %r2, %r3, %r4};",
)
READ = replace(
    WRITE,
    agent="tensor core of warp 4 of cta(0,0,0)",
    role="tcgen05.mma.cta_group::1.kind::f16",
    what="read",
    line=55,
    text="tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd2, %rd3, %r4, %p1;",
)
RACE = Finding(
    "race",
    "the multiplication is not ordered after the store",
    line=55,
    accesses=(WRITE, READ),
    missing="fence.proxy.async behind the store",
    rule="PTX ISA, membar",
)


def launched(*findings: Finding, entry: str = "gemm", **options: object) -> LaunchReport:
    return LaunchReport(
        entry,
        (4, 1, 1),
        (192, 1, 1),
        (2, 1, 1),
        by_warp=OPCODES,
        findings=list(findings),
        options=ptxemu.Options(check=True, **options),
    )


def by(finding: Finding, **changes: object) -> Finding:
    """Return the finding with a changed first access."""
    first, *rest = finding.accesses
    return replace(finding, accesses=(replace(first, **changes), *rest))


def test_a_finding_tells_all_it_knows():
    assert render(Report([launched(RACE)])) == (
        "kernel gemm\n"
        "  grid (4), block (192), cluster (2)\n"
        "\n"
        "error: race: the multiplication is not ordered after the store\n"
        "  write of shared memory of cta(0,0,0), bytes 0x400 to 0x40f"
        " by warp 0 (TMEM read, epilogue store)\n"
        "    PTX line 40: st.shared.v4.b32 [%r3], {%r1, %r2, %r3, %r4};\n"
        "  read of shared memory of cta(0,0,0), bytes 0x400 to 0x40f"
        " by tensor core of warp 4 (MMA)\n"
        "    PTX line 55: tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd2, %rd3, %r4, %p1;\n"
        "  missing: fence.proxy.async behind the store\n"
        "  rule: PTX ISA, membar\n"
        "\n"
        "1 error in 1 launch; rules: hardware"
    )


def test_warps_and_ctas_with_one_cause_are_one_finding():
    found = [
        by(RACE, agent=f"warp {warp} of cta({cta},0,0)", first=16 * warp, last=16 * warp + 15)
        for cta in range(3)
        for warp in (0, 1, 2, 7)
    ]
    text = render(Report([launched(*found, roles=dict.fromkeys(range(8), "softmax"))]))
    assert text.count("error: race") == 1
    assert "seen 12 times, in 3 CTAs\n" in text
    assert (
        "write of shared memory of cta(0,0,0), bytes 0x0 to 0xf (and 3 other ranges)"
        " by warps 0-2, 7 (softmax) of 3 CTAs\n" in text
    )


@pytest.mark.parametrize(
    "other",
    [
        replace(RACE, accesses=(WRITE, replace(READ, line=56))),
        replace(RACE, check="store-source"),
        replace(RACE, severity="note"),
        replace(RACE, missing="tcgen05.commit"),
        by(RACE, line=41),
        by(RACE, what="read"),
    ],
)
def test_another_cause_is_another_finding(other):
    assert RACE.place != other.place
    assert render(Report([launched(RACE, other)])).count("missing: ") == 2


def test_the_order_of_the_two_makes_no_other_cause():
    turned = replace(RACE, line=40, accesses=(READ, replace(WRITE, agent="warp 1 of cta(0,0,0)")))
    text = render(Report([launched(RACE, turned)]))
    assert text.endswith("1 error in 1 launch; rules: hardware")
    assert "write of shared memory of cta(0,0,0), bytes 0x400 to 0x40f by warps 0-1 (" in text


def test_one_instruction_in_two_places_is_two_findings():
    found = [Finding("exited", "too early", line=line, text="exit;") for line in (9, 12, 9)]
    text = render(Report([launched(*found)]))
    assert text.endswith("2 errors in 1 launch; rules: hardware")
    assert "  seen 2 times\n  PTX line 9: exit;" in text


def test_an_unrolled_loop_is_one_place():
    found = [by(RACE, source="loop.py:7", line=40 + copy) for copy in range(3)]
    text = render(Report([launched(*found, by(RACE, source="loop.py:8"))]))
    assert text.endswith("2 errors in 1 launch; rules: hardware")
    assert "    PTX line 40 (and 2 others): st.shared.v4.b32 [" in text


def test_who_issued_what_no_warp_does():
    text = "@%p1 cp.async.bulk.tensor.2d.shared::cta.global.tile [%r1], [%rd1];"
    agent = by(RACE, agent="mbarrier 0x418 of cta(0,0,0)", text=text)
    assert "by mbarrier 0x418 of cta(0,0,0), issued by warp 5 (TMA load)\n" in render(
        Report([launched(replace(agent, accesses=(replace(agent.accesses[0], role=""), READ)))])
    )


def test_two_warps_at_one_instruction_stay_two_sides():
    other = replace(WRITE, agent="warp 1 of cta(0,0,0)")
    text = render(Report([launched(replace(RACE, accesses=(WRITE, other)))]))
    assert "by warp 0 (" in text
    assert "by warp 1\n" in text


def test_an_agent_of_another_cta_says_so():
    assert "by warp 0 (TMEM read, epilogue store) of cta(1,0,0)\n" in render(
        Report([launched(by(RACE, agent="warp 0 of cta(1,0,0)"))])
    )


def test_findings_without_places_differ_by_their_words():
    report = Report([launched(Finding("tmem", "32 columns left"), Finding("tmem", "64 left"))])
    assert verdict(report) == "2 errors in 1 launch; rules: hardware"


def test_errors_first_then_races():
    note = replace(RACE, severity="note", message="only the manual")
    text = render(Report([launched(note, Finding("tmem", "not freed"), RACE, strict=True)]))
    order = [text.index(words) for words in ("the multiplication", "not freed", "only the manual")]
    assert order == sorted(order)
    assert text.endswith("2 errors, 1 note in 1 launch; rules: hardware, manual")


def test_schedules_are_told_where_they_differ():
    launches = [launched(RACE, policy="random", seed=seed) for seed in (1, 2)]
    assert "in all 2 launches\n" in render(Report(launches))
    launches.append(launched())
    assert "in 2 of 3 launches, under random, seed 1; random, seed 2\n" in render(Report(launches))


def test_kernels_stand_apart():
    text = render(Report([launched(RACE), launched(entry="clean"), launched(RACE, entry="merge")]))
    assert (text.count("kernel gemm"), text.count("kernel merge")) == (1, 1)
    assert "kernel clean" not in text
    assert text.endswith("2 errors in 3 launches; rules: hardware")


def test_a_launch_that_stopped_says_why():
    stopped = replace(launched(RACE), stopped="Deadlock: warp 4 waits")
    text = render(Report([stopped]))
    assert "stopped: Deadlock: warp 4 waits" in text
    assert text.endswith("1 error, 1 launch stopped early in 1 launch; rules: hardware")


def test_the_line_of_python_is_quoted(monkeypatch, tmp_path):
    (tmp_path / "kernel.py").write_text("first = 1\n    gemm(a, b)  # here\n")
    monkeypatch.chdir(tmp_path)
    finding = by(RACE, source=f"{tmp_path / 'kernel.py'}:2")
    assert "    at kernel.py:2: gemm(a, b)  # here\n" in render(Report([launched(finding)]))
    elsewhere = by(RACE, source=f"{Path('nowhere')}/x.py:3")
    assert "    at nowhere/x.py:3\n" in render(Report([launched(elsewhere)]))


@pytest.mark.parametrize(
    ("access", "words"),
    [
        ({"space": "tensor", "first": 0, "last": 31}, "tensor memory, columns 0 to 31 by"),
        ({"space": "global", "first": 64, "last": 64}, "global memory, byte 0x40 by"),
        ({"agent": "the host"}, "by the host\n"),
        ({"role": "clean-up"}, "by clean-up of warp 0 (TMEM read"),
    ],
)
def test_ranges_and_agents(access, words):
    assert words in render(Report([launched(by(RACE, **access))]))


def test_the_instruction_of_a_finding_is_told_once():
    assert render(Report([launched(RACE)])).count("PTX line 55") == 1
    assert "  PTX line 9: exit;" in render(
        Report([launched(Finding("exited", "too early", line=9, text="exit;"))])
    )


def test_document_is_plain_json():
    report = Report([launched(RACE, Finding("tmem", "left", severity="note"), policy="random")])
    values = json.loads(json.dumps(document(report)))
    assert (values["errors"], values["notes"]) == (1, 1)
    (entry,) = values["launches"]
    assert (entry["grid"], entry["cluster"]) == ([4, 1, 1], [2, 1, 1])
    assert (entry["policy"], entry["seed"], entry["rules"]) == ("random", 0, "hardware")
    assert entry["roles"]["4"] == "MMA"
    assert entry["by_warp"]["4"]["tcgen05.mma.cta_group::1.kind::f16"] == 8
    race, leak = entry["findings"]
    assert race["missing"] == RACE.missing
    assert (race["accesses"][1]["warp"], race["accesses"][1]["cta"]) == (4, "cta(0,0,0)")
    assert (race["accesses"][0]["first"], race["accesses"][0]["line"]) == (0x400, 40)
    assert (leak["severity"], leak["accesses"]) == ("note", [])
    assert "by_warp" not in document(report, counts=False)["launches"][0]


def test_errors_are_no_notes():
    report = Report([launched(RACE, replace(RACE, severity="note"))])
    assert report.errors == [RACE]
    assert len(report.findings) == 2


# ---- roles


@pytest.mark.parametrize(
    ("opcodes", "words"),
    [
        ("cp.async.bulk.tensor.4d.shared::cta.global.tile mbarrier.arrive.b64", "TMA load"),
        ("cp.async.bulk.tensor.2d.global.shared::cta.tile", "TMA store"),
        ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes", "bulk load"),
        ("cp.async.cg.shared.global", "cp.async load"),
        ("tcgen05.commit.b64 tcgen05.mma.cta_group::2.kind::f16", "MMA"),
        ("tcgen05.ld.x1 st.global.b32", "TMEM read, epilogue store"),
        ("tcgen05.ld.x1 cp.async.bulk.tensor.2d.global.shared::cta", "TMEM read, epilogue TMA"),
        ("ld.global.nc.v4.b32 st.global.b32 ld.param.b64", "load, store"),
        ("ld.relaxed.gpu.global.b32 atom.global.add.u32", "load, store"),
        ("st.async.weak.shared::cluster.b32 ld.param.b64", "store to a peer"),
        ("ld.param.b64 st.shared.b32", "shared memory only"),
        ("ld.acquire.cluster.shared::cluster.b32", "shared memory only"),
        ("mbarrier.try_wait.b64 ld.param.b64", "barriers only"),
        ("mov.b32 ld.param.b64", "registers only"),
    ],
)
def test_a_warp_is_what_it_executes(opcodes, words):
    assert describe(dict.fromkeys(opcodes.split(), 1)).startswith(words)


def test_a_given_role_comes_first():
    found = roles_of(launched(roles={4: "mma", 9: "idle"}))
    assert found == {0: "TMEM read, epilogue store", 4: "mma", 5: "TMA load", 9: "idle"}


def test_what_lacks_the_same_is_told_in_short_after_the_third():
    found = [by(RACE, source=f"kernel.py:{line}") for line in range(5)]
    text = render(Report([launched(*found)]))
    assert text.count("missing: fence.proxy.async behind the store") == 3
    assert text.count("  write at kernel.py:4\n  read at PTX line 55\n  missing: as above") == 1
    assert text.endswith("5 errors in 1 launch; rules: hardware")


def test_what_is_known_beside_addresses_is_told():
    found = replace(by(RACE, known_as="parameter 2 + 64 bytes"), why="nobody has waited")
    text = render(Report([launched(found)]))
    assert "bytes 0x400 to 0x40f (parameter 2 + 64 bytes) by warp 0" in text
    assert "  why: nobody has waited\n  missing: fence" in text


def test_an_overrun_is_read_first():
    overrun = Finding("out-of-bounds", "write to 4 bytes behind", line=3)
    text = render(Report([launched(RACE, overrun)]))
    assert text.index("out-of-bounds") < text.index("race")


# y[i] = 2 x[i] by each of two warps per CTA, with a barrier between load and store.
DOUBLE = kernel(
    """ld.param.u64 %rd0, [x];
    ld.param.u64 %rd1, [y];
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, %ctaid.x;
    mad.lo.u32 %r2, %r1, 64, %r0;
    mul.wide.u32 %rd2, %r2, 4;
    add.u64 %rd3, %rd0, %rd2;
    add.u64 %rd4, %rd1, %rd2;
    ld.global.f32 %f0, [%rd3];
    add.f32 %f1, %f0, %f0;
    bar.sync 0;
    st.global.f32 [%rd4], %f1;""",
    ".param .u64 x, .param .u64 y",
)
CTAS = 3


def doubled(**options: object) -> tuple[ptxemu.LaunchReport, np.ndarray, np.ndarray]:
    x, y = np.arange(64 * CTAS, dtype=np.float32), np.full(64 * CTAS, np.nan, np.float32)
    return launch(DOUBLE, x, y, grid=(CTAS,), block=(64,), **options), x, y


def test_counts_are_per_warp_and_opcode():
    report, x, y = doubled()
    assert np.array_equal(y, 2 * x)
    assert set(report.by_warp) == {0, 1}
    for counter in report.by_warp.values():
        assert counter["ld.param.u64"] == 2 * CTAS
        assert counter["bar.sync"] == CTAS
        assert sum(counter.values()) == 13 * CTAS
    assert report.warp_instructions == 2 * 13 * CTAS
    assert report.grid == (CTAS, 1, 1)


def test_bytes_are_per_path():
    report, x, _ = doubled()
    assert report.bytes["ld.global"] == report.bytes["st.global"] == x.nbytes


def test_a_trace_is_asked_for_and_changes_no_bits(tmp_path):
    plain, _, expected = doubled()
    traced, _, y = doubled(trace=True)
    assert plain.trace is None
    assert np.array_equal(y, expected)
    assert traced.warp_instructions == plain.warp_instructions
    assert traced.trace.ctas() == list(range(CTAS))
    assert traced.trace.agents(0) == ["warp 0", "warp 1"]
    busy = sum(s.end - s.start for s in traced.trace.spans if s.category == "compute")
    assert busy == traced.warp_instructions  # one nominal cycle each
    path = tmp_path / "trace.json"
    traced.trace.to_perfetto(path)
    assert json.loads(path.read_text())["traceEvents"]


@pytest.mark.parametrize("policy", ["round-robin", "random", "adversarial"])
def test_every_policy_runs_every_instruction_once(policy):
    assert doubled(policy=policy)[0].warp_instructions == 2 * 13 * CTAS


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": "lifo"}, "policy='lifo'; must be one of round-robin"),
        ({"resident": 0}, "resident=0; must be >= 1"),
        ({"limit": 0}, "limit=0; must be > 0"),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(ValueError, match=words):
        ptxemu.Options(**options)


def test_blas_threads_are_restored():
    control = machine._thread_control()
    if control is None:
        pytest.skip("numpy was built with another BLAS than OpenBLAS")
    set_threads, get_threads = control
    before = get_threads()
    set_threads(2)
    try:
        with machine.one_thread():
            assert get_threads() == 1
        assert get_threads() == 2
    finally:
        set_threads(before)
