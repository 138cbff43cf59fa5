"""Subjects, records and the table, with invented runs."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from lab.mutation import campaign, subject
from lab.mutation.campaign import (
    Record,
    Records,
    counts,
    shares,
    show,
    survivors,
    within_contract,
)
from lab.mutation.subject import SCHEDULES, WRONG_BITS, Subject
from lab.mutation.subjects import CATEGORIES, REASONS
from ptxemu.mutation.rerun import BROKEN, CHECKER, DEADLOCK, UNNOTICED, Verdict


def test_other_bits_and_errors_tell_a_mutant():
    results = iter([1.0, 1.0, 2.0])
    subject = Subject(lambda: (torch.tensor([next(results)]),))
    assert [subject.run() for _ in range(3)] == ["", "", WRONG_BITS]
    assert subject.run().startswith("StopIteration")


def test_a_kernel_that_differs_between_schedules_is_no_measure():
    results = iter([1.0, 2.0])
    subject = Subject(lambda: (torch.tensor([next(results)]),))
    with pytest.raises(ValueError, match="the kernel itself: wrong bits"):
        subject.judge(dict([*SCHEDULES.items()][:2]))


def test_what_is_noted_is_told_by_the_strict_rules(monkeypatch):
    schedules = []

    def verdict(run, kernel, lines, asked, known):
        schedules.append([options.get("strict", False) for options in asked.values()])
        return Verdict(CHECKER if schedules[-1] == [True] else UNNOTICED)

    monkeypatch.setattr(subject, "verdict", verdict)
    judge = Subject(lambda: (torch.tensor([1.0]),)).judge(dict([*SCHEDULES.items()][:2]))
    mutant = SimpleNamespace(change=SimpleNamespace(lines={}))
    assert not judge.verdict("kernel", mutant).noticed
    assert judge.noted("kernel", mutant)
    assert schedules == [[False, False], [True]]


def record(line=1, by=CHECKER, equivalent="", kind="remove wait"):
    return Record("kernel", "digest", kind, line, "wait;", equivalent, by, "", "", 0.1)


def test_shares():
    killed, equivalent, survivor = (
        record(),
        record(by=UNNOTICED, equivalent="argued"),
        record(by=""),
    )
    assert shares([killed, equivalent]) == (0.5, 1.0)
    assert shares([killed, survivor]) == (0.0, 0.5)
    assert shares([killed, record(by=BROKEN)]) == (0.0, 0.5)
    assert shares([record(equivalent="argued, wrongly")]) == (0.0, 1.0)
    assert within_contract([killed] * 97 + [survivor] * 3 + [equivalent] * 10)
    assert not within_contract([killed] * 97 + [survivor] * 4)
    assert not within_contract([killed] * 80 + [equivalent] * 20)
    found = counts([killed, killed, equivalent, survivor])
    columns = (CHECKER, "equivalent", "survived", "mutants")
    assert [found[column] for column in columns] == [2, 1, 1, 4]


def test_the_table_lists_what_survives_and_why_others_are_equivalent():
    console = Console(file=io.StringIO(), width=120)
    show(
        [record(), record(2, UNNOTICED), record(3, UNNOTICED, "the next edge implies it")], console
    )
    text = console.file.getvalue()
    assert "Survivors, unexplained:\n  kernel: remove wait @2  wait;" in text
    assert "remove wait: the next edge implies it" in text
    assert "33.3% equivalent" in text
    assert "50.0% killed" in text


def test_a_survivor_has_a_named_reason():
    misled = record(by=UNNOTICED, kind="misdirect wait forth")
    found = survivors([misled, record(by=UNNOTICED), record()])
    assert {name: len(rows) for name, rows in found.items() if rows} == {
        "Survivors, ordered by another edge": 1, "Survivors, unexplained": 1,
    }  # fmt: skip
    assert all(reason.category in CATEGORIES for reason in REASONS)


def test_records_are_kept_and_replaced(tmp_path):
    path = tmp_path / "there" / "mutants.json"
    records = Records(path)
    records.add(record(1))
    records.add(record(2, by=UNNOTICED))
    records.add(record(2, by=DEADLOCK))
    records.save()
    assert not list(path.parent.glob("*.part"))
    again = Records(path)
    assert again.by_key == records.by_key
    assert again.by_key["kernel", "digest", "remove wait", 2].by == DEADLOCK
    again.forget_other_kernels([(("kernel", "another", "remove wait", 1), None)])
    assert not again.by_key


def test_a_crash_is_a_record(monkeypatch):
    mutant = SimpleNamespace(instruction="wait;", equivalent="", executed=True)
    judge = SimpleNamespace(verdict=lambda *_: 1 / 0)
    key = ("kernel", "digest", "remove wait", 1)
    monkeypatch.setattr(campaign, "_prepared", lambda *_: (judge, {key: mutant}))
    found = campaign.judged(key, 1)
    assert found.by == BROKEN
    assert found.how.startswith("ZeroDivisionError")


def test_what_is_not_executed_is_not_judged(monkeypatch):
    mutant = SimpleNamespace(instruction="wait;", equivalent="", executed=False)
    key = ("kernel", "digest", "remove wait", 1)
    monkeypatch.setattr(campaign, "_prepared", lambda *_: (None, {key: mutant}))
    assert campaign.judged(key, 1).unreached
