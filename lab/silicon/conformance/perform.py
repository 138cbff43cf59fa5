"""Implementation of conformance.py: compares every form in ptxemu with the GPU or a record."""

from __future__ import annotations

import argparse
import collections
import datetime
import itertools
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

import ptxemu
from lab.silicon.conformance import (
    coverage,
    elementwise,
    everything,
    hw_runner,
    precision,
    questions,
    unavailable,
)
from lab.silicon.conformance.campaign import (
    Campaign,
    Device,
    Outputs,
    Tally,
    campaign,
    emulated,
    refusals,
)
from lab.silicon.conformance.case import Case
from lab.silicon.conformance.journal import Journal
from lab.silicon.conformance.ptx_program import Program, aimed_at, emulate

FAILED, REFUSED, INCOMPLETE = 1, 2, 3  # exit codes
RECORD = Path(__file__).resolve().parents[3] / "results" / "conformance_h100.json"
_OUTPUT_BYTES = 64 << 20  # before they are compressed


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
    """Return a line per instruction: forms, inputs, forms with equal bits, within a bound, and
    others."""
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
    devices = [Device() for _ in range(arguments.contexts)]
    try:
        setting = devices[0].ask(hw_runner.device)
    except Exception as error:  # noqa: BLE001  whatever keeps a GPU from answering
        print(f"refused: no GPU to compare with: {error}", file=sys.stderr)
        return REFUSED
    setting |= {"programs": f".version {elementwise.VERSION}", "date": str(datetime.date.today())}
    setting |= {"accumulation": arguments.accumulation}
    print(", ".join(f"{key} {value}" for key, value in setting.items()))
    result = Campaign()
    missing = _refused(devices[0], result)
    aligned = arguments.accumulation == "aligned"
    cases = chosen(everything.cases(result.refused, aligned=aligned), arguments.only)
    try:
        journal = Journal(arguments.resume, setting)
    except ValueError as error:
        print(f"refused: {error}", file=sys.stderr)
        return REFUSED
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    left = [case for case in cases if not journal.restore(case, result)]
    left.sort(key=lambda case: everything.is_recorded(record, case))
    newer = sum(not everything.is_recorded(record, case) for case in left)
    print(f"{len(cases)} programs, {len(left)} to do, {newer} newer than {RECORD.name}", flush=True)
    whole = _asked(devices, left, result, journal, arguments, setting["target"])
    for device in devices:
        device.close()
    code = report(result, setting, missing, arguments)
    return code if whole else INCOMPLETE


def _refused(device: Device, result: Campaign) -> list[str]:
    """Add what the compiler rejects to the result. Return instructions that both ptxemu and the
    compiler reject, contrary to `declined`."""

    def ask(text: str) -> str:
        return device.ask(hw_runner.refusal, text)

    variants = everything.variants()
    answers = refusals(ask, variants, elementwise.question)
    result.refused |= {variants[k].key: why for k, why in answers.items()}
    answers = refusals(ask, unavailable.instructions(), unavailable.question)
    result.refused |= everything.refused_instructions(answers)
    lines = coverage.instructions()
    return [lines[k] for k in refusals(ask, lines, coverage.question)]


def _asked(
    devices: list[Device],
    cases: list[Case],
    result: Campaign,
    journal: Journal,
    arguments: argparse.Namespace,
    target: str,
) -> bool:
    """Whether all cases could be asked about within the seconds."""
    how = arguments.accumulation, target
    start, differing = time.monotonic(), dict[str, np.ndarray]()
    answers = campaign(devices, cases, arguments.jobs, how)
    for done, answer in enumerate(answers, 1):
        name, said = answer.case.name, answer.said
        result.absorb(said)
        journal.keep(answer.case, said)
        for failure in said.failures.values():
            print(f"{name}: {failure}"[:500], flush=True)
        wrong = everything.different(said)
        if wrong:
            print(f"{name}: DIFFERS in {', '.join(wrong)}"[:500], flush=True)
            differing |= {f"{name}/{label}": data for label, data in answer.gpu.items()}
        elapsed = time.monotonic() - start
        if done % 100 == 0 or done == len(cases):
            print(f"{done} of {len(cases)} programs, {elapsed:.0f} s", flush=True)
        if arguments.seconds and elapsed > arguments.seconds and done < len(cases):
            print(f"stopped after {elapsed:.0f} s; --resume goes on from here", flush=True)
            answers.close()
            break
    if arguments.outputs and differing:
        _save(arguments.outputs, differing)
    return done == len(cases) if cases else True


def _save(path: Path, found: dict[str, np.ndarray]) -> None:
    """Save the GPU's differing outputs, up to a limit of disk space."""
    kept: dict[str, np.ndarray] = {}
    for name, data in sorted(found.items(), key=lambda item: item[1].nbytes):
        if sum(x.nbytes for x in kept.values()) + data.nbytes <= _OUTPUT_BYTES:
            kept[name.replace("/", "|")] = data
    np.savez_compressed(path, **kept)


def report(
    result: Campaign, setting: dict[str, str], missing: list[str], arguments: argparse.Namespace
) -> int:
    print(table(result))
    for text in missing:
        print(f"this GPU does not have it, though `declined` lists it: {text}")
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
    if arguments.accumulation == "aligned":
        kept += everything.recorded_sums(record)
    cases, gpu, wrong = chosen(kept, arguments.only), record["setting"]["gpu"], 0
    how = arguments.accumulation, record["setting"]["target"]
    found = emulated(cases, arguments.jobs, how)
    for name in everything.unlike(record, found):
        wrong += 1
        print(f"{name}: not what {gpu} left in memory")
    print(f"{len(cases) - wrong} of {len(cases)} programs as on {gpu}")
    if newer:
        print(f"newer than the record, which has nothing of them: {', '.join(newer)}")
    return FAILED if wrong else 0


def asked_about(arguments: argparse.Namespace) -> int:
    """Answer on this GPU the questions that the manual leaves open."""
    device = Device()
    try:
        setting = device.ask(hw_runner.device)
    except Exception as error:  # noqa: BLE001  whatever keeps a GPU from answering
        print(f"refused: no GPU to ask: {error}", file=sys.stderr)
        return REFUSED
    setting |= {"date": str(datetime.date.today())}
    print(", ".join(f"{key} {value}" for key, value in setting.items()))

    def run(program: Program) -> Outputs:
        return device.ask(hw_runner.launch, program)

    def emulated_too(program: Program) -> Outputs:
        options = ptxemu.Options(limit=None, accumulation=arguments.accumulation)
        aimed = aimed_at(program, setting["target"])
        return emulate(aimed, ptxemu.load(aimed.text), options)

    found = []
    for line in itertools.chain(precision.table(run, emulated_too), questions.answers(run)):
        print(line, flush=True)
        found.append(line)
    device.close()
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        whole = {"setting": setting, "answers": found}
        arguments.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return 0


def perform(arguments: argparse.Namespace) -> int:
    """Do what the flags request; return the exit code."""
    if arguments.questions:
        return asked_about(arguments)
    return against_record(arguments) if arguments.recorded else on_gpu(arguments)
