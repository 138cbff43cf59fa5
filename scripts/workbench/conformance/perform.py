"""What conformance.py does: every form on the GPU at hand and in ptxemu, or against a record."""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import sys
from collections.abc import Iterable

from workbench.conformance import elementwise, everything, hw_runner, unavailable
from workbench.conformance.campaign import (
    Campaign,
    Device,
    Tally,
    campaign,
    emulated,
    refusals,
)
from workbench.conformance.case import Case

FAILED, REFUSED = 1, 2  # exit codes


def compact(document: dict[str, object]) -> str:
    """JSON with one line per entry of each part."""
    parts = []
    for key, value in document.items():
        if isinstance(value, dict) and value:
            lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            parts.append(f" {json.dumps(key)}: {{\n{lines}\n }}")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def table(result: Campaign) -> str:
    """One line per instruction: forms, inputs, forms with the same bits, within a bound, else."""
    families: dict[str, list[tuple[str, Tally]]] = collections.defaultdict(list)
    for form, tally in sorted(result.forms.items()):
        families[form.split(".")[0]].append((form, tally))
    lines = [f"{'instruction':<22}{'forms':>6}{'inputs':>12}{'same':>7}{'near':>6}{'else':>6}"]
    for name, members in families.items():
        same = sum(tally.same == tally.inputs for _, tally in members)
        near = sum(tally.right and tally.same < tally.inputs for _, tally in members)
        inputs = sum(tally.inputs for _, tally in members)
        rest = len(members) - same - near
        lines.append(f"{name:<22}{len(members):>6}{inputs:>12,}{same:>7}{near:>6}{rest:>6}")
    return "\n".join(lines)


def chosen(cases: Iterable[Case], words: list[str]) -> list[Case]:
    return [case for case in cases if not words or any(word in case.name for word in words)]


def on_gpu(arguments: argparse.Namespace) -> int:
    device = Device()
    try:
        setting = device.ask(hw_runner.device)
    except Exception as error:  # noqa: BLE001  whatever keeps a GPU from answering
        print(f"refused: no GPU to compare with: {error}", file=sys.stderr)
        return REFUSED
    setting |= {"programs": f".version {elementwise.VERSION}", "date": str(datetime.date.today())}
    print(", ".join(f"{key} {value}" for key, value in setting.items()))
    result = Campaign()

    def ask(text: str) -> str:
        return device.ask(hw_runner.refusal, text)

    variants = everything.variants()
    answers = refusals(ask, variants, elementwise.question)
    result.refused |= {variants[k].opcode: why for k, why in answers.items()}
    answers = refusals(ask, unavailable.instructions(), unavailable.question)
    result.refused |= everything.refused_instructions(answers)
    cases = chosen(everything.cases(result.refused), arguments.only)
    for done, (name, failure) in enumerate(campaign(device, cases, result, arguments.jobs), 1):
        if failure:
            print(f"{name}: {failure}")
        elif done % 200 == 0:
            print(f"{done} of {len(cases)} programs")
    device.close()
    return report(result, setting, arguments)


def report(result: Campaign, setting: dict[str, str], arguments: argparse.Namespace) -> int:
    print(table(result))
    for form, tally in result.forms.items():
        if not tally.right:
            why = everything.EXPLAINED.get(form, "NOT EXPLAINED")
            print(f"{form}: {tally.same} of {tally.inputs} inputs; {why}")
            print("\n".join(f"    {example}" for example in tally.examples[:2]))
    found = everything.document(result, setting)
    print(", ".join(f"{key} {value}" for key, value in found["summary"].items()))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(compact(found), encoding="utf-8")
    return FAILED if everything.different(result) or result.failures else 0


def against_record(arguments: argparse.Namespace) -> int:
    """ptxemu alone: the digest of every case's outputs must be the recorded one."""
    record = json.loads(arguments.recorded.read_text(encoding="utf-8"))
    kept, newer = everything.recorded(record)
    cases, gpu, wrong = chosen(kept, arguments.only), record["setting"]["gpu"], 0
    for name in everything.unlike(record, emulated(cases, arguments.jobs)):
        wrong += 1
        print(f"{name}: not what {gpu} left in memory")
    print(f"{len(cases) - wrong} of {len(cases)} programs as on {gpu}")
    if newer:
        print(f"newer than the record, which has nothing of them: {', '.join(newer)}")
    return FAILED if wrong else 0


def perform(arguments: argparse.Namespace) -> int:
    """What the flags ask for; returns the exit code."""
    return against_record(arguments) if arguments.recorded else on_gpu(arguments)
