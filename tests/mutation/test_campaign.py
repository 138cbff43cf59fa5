"""Verdicts, records and the table, on runs that are made up."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from ptxemu import Deadlock, Finding, Options
from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from workbench.mutation import campaign
from workbench.mutation.campaign import Record, Records
from workbench.mutation.table import counts, shares, show, within_contract
from workbench.mutation.verdict import BITS, BROKEN, CHECKER, DEADLOCK, REFUSED, SURVIVED, Judge

FIRST, SECOND = Options(), Options(policy="random", seed=3)
KNOWN = Finding("race", "of the kernel itself", line=3)


def judge(run):
    """`run` says what a mutant does; the kernel's result is 1, and it has one finding."""

    def whole(ptx, options):
        if ptx == "kernel":
            return (1,), [SimpleNamespace(errors=[KNOWN])]
        results, findings = run(options)
        return results, [SimpleNamespace(errors=findings)]

    return Judge("kernel", whole, lambda a, b: a == b, (FIRST, SECOND))


def test_the_strict_rules_note_what_others_excuse():
    note = Finding("order", "no tcgen05.fence", severity="note", line=7)

    def run(ptx, options):
        findings = [KNOWN] + [note] * (options.strict and ptx == "mutant")
        errors = [finding for finding in findings if finding.severity == "error"]
        return (1,), [SimpleNamespace(errors=errors, findings=findings)]

    found = Judge("kernel", run, lambda a, b: a == b, (FIRST,))
    assert found.verdict("mutant").by == SURVIVED
    assert found.noted("mutant")
    assert not found.noted("kernel")


def raising(error):
    def run(options):
        raise error

    return run


@pytest.mark.parametrize(
    ("run", "by", "schedule"),
    [
        (lambda _: ((1,), []), SURVIVED, "random 3"),
        (lambda _: ((1,), [KNOWN]), SURVIVED, "random 3"),
        (lambda _: ((2,), []), BITS, "round-robin"),
        (lambda options: ((1 + (options is SECOND),), []), BITS, "random 3"),
        (lambda _: ((2,), [Finding("race", "new", line=5)]), CHECKER, "round-robin"),
        (raising(Deadlock("no warp can go on\n  warp 0")), DEADLOCK, "round-robin"),
        (raising(HardwareRefusal("no such barrier")), REFUSED, "round-robin"),
        (raising(UnsupportedPtx("what is this")), BROKEN, "round-robin"),
    ],
)
def test_what_tells_a_mutant(run, by, schedule):
    verdict = judge(run).verdict("mutant")
    assert (verdict.by, verdict.schedule) == (by, schedule)
    assert "\n" not in verdict.how
    assert verdict.killed == (by not in (SURVIVED, BROKEN))


def test_a_kernel_that_differs_between_schedules_is_no_measure():
    results = iter([(1,), (2,)])
    with pytest.raises(ValueError, match="differs under random 3"):
        Judge("kernel", lambda *_: (next(results), []), lambda a, b: a == b, (FIRST, SECOND))


def record(line=1, by=CHECKER, equivalent="", kind="remove wait"):
    return Record("kernel", kind, line, "wait;", equivalent, "digest", by, "", "", 0.1)


def test_shares():
    killed, equivalent, survivor = record(), record(by=SURVIVED, equivalent="argued"), record(by="")
    assert shares([killed, equivalent]) == (0.5, 1.0)
    assert shares([killed, survivor]) == (0.0, 0.5)
    assert shares([killed, record(by=BROKEN)]) == (0.0, 0.5)
    assert shares([record(equivalent="argued, wrongly")]) == (0.0, 1.0)
    assert within_contract([killed] * 95 + [survivor] * 5 + [equivalent] * 10)
    assert not within_contract([killed] * 95 + [survivor] * 6)
    assert not within_contract([killed] * 80 + [equivalent] * 20)
    found = counts([killed, killed, equivalent, survivor])
    columns = (CHECKER, "equivalent", "survived", "mutants")
    assert [found[column] for column in columns] == [2, 1, 1, 4]


def test_the_table_lists_what_survives_and_why_others_are_equivalent():
    console = Console(file=io.StringIO(), width=120)
    show([record(), record(2, SURVIVED), record(3, SURVIVED, "the next edge implies it")], console)
    text = console.file.getvalue()
    assert "kernel: remove wait @2  wait;" in text
    assert "remove wait: the next edge implies it" in text
    assert "33.3% equivalent" in text
    assert "50.0% killed" in text


def test_records_are_kept_and_replaced(tmp_path):
    path = tmp_path / "there" / "mutants.json"
    records = Records(path)
    records.add(record(1))
    records.add(record(2, by=SURVIVED))
    records.add(record(2, by=BITS))
    records.save()
    assert not list(path.parent.glob("*.part"))
    again = Records(path)
    assert again.by_key == records.by_key
    assert again.by_key["kernel", "remove wait", 2].by == BITS


def test_a_crash_is_a_record(monkeypatch):
    mutant = SimpleNamespace(
        ptx="", instruction="wait;", equivalent="", text=SimpleNamespace(ptx="")
    )
    judge = SimpleNamespace(verdict=lambda _: 1 / 0)
    key = ("kernel", "remove wait", 1)
    monkeypatch.setattr(campaign, "_prepared", lambda *_: (judge, {key: mutant}))
    found = campaign.judged(key, 1)
    assert found.by == BROKEN
    assert found.how.startswith("ZeroDivisionError")
