"""Every form of an instruction that a shipped kernel uses, on a GPU beside the emulator.

    python -m workbench.bringup.instructions --arch sm_100a --json out/instructions.json
    python -m workbench.bringup.instructions --arch sm_100a --emulate

Programs of a few instructions come before those of the tensor core. Each runs in a process of its
own where the one before it hung or died. A row says of a program: `same bits` as the emulator,
`within bounds` of the manual where an instruction is an approximation, `differs` with the first
differences, `refused` by the GPU's compiler or by the emulator with the reason, `hang`, or `died`;
and of one that failed, which kernels use its forms. With --emulate, which needs no GPU: `as
expected`, where a program's file says what it gives, or `runs`, where nothing but the emulator
does. Exit code 1: a program failed; 2: refused, for there is no GPU of the architecture.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import TimeoutError as Late
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from functools import partial

from workbench.bringup import table
from workbench.bringup.programs import Test, every
from workbench.common import refuse, write_json
from workbench.conformance import everything, hw_runner
from workbench.conformance.campaign import Campaign, Device, Outputs
from workbench.conformance.ptx_program import aimed_at, check
from workbench.flags import groups

SAME, NEAR, EXPECTED, RUNS = "same bits", "within bounds", "as expected", "runs"
DIFFERS, REFUSED, HANG, DIED, LEFT = "differs", "refused", "hang", "died", "not run"
GOOD = (SAME, NEAR, EXPECTED, RUNS)
MOST_HANGS = 3  # one after the other; the GPU is then past helping
_WORDS = 400  # characters of a difference


@dataclass
class Row:
    """forms: of the program, those that kernels use; kernels: that depend on what failed."""

    program: str
    forms: list[str]
    verdict: str = LEFT
    differences: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.verdict not in GOOD


Run = Callable[[Test], tuple[str, dict[str, list[str]]]]  # verdict, form -> differences


def natively(gpu: Device, emulator: Device, arch: str, test: Test) -> tuple[str, dict]:
    """On the GPU, whose bits are compared with the emulator's and with what is known besides."""
    aimed = aimed_at(test.case.program, arch)
    found = gpu.ask(hw_runner.launch, aimed)
    result = Campaign()
    result.judge(test.case, found, emulator.ask(test.emulated, arch))
    wrong = {form: tally.examples for form, tally in everything.different(result).items()}
    if not wrong and test.checked:
        wrong = _unlike_file(test, found)
    near = any(tally.same < tally.inputs for tally in result.forms.values())
    return DIFFERS if wrong else NEAR if near else SAME, wrong


def in_emulator(emulator: Device, arch: str, test: Test) -> tuple[str, dict]:
    """What its file says, where it does."""
    found = emulator.ask(test.emulated, arch)
    if not test.checked:
        return RUNS, {}
    wrong = _unlike_file(test, found)
    return DIFFERS if wrong else EXPECTED, wrong


def _unlike_file(test: Test, found: Outputs) -> dict[str, list[str]]:
    """All of its forms, if it gives other outputs than its file says."""
    try:
        check(test.case.program, found)
    except AssertionError as difference:
        return dict.fromkeys(test.case.forms, [str(difference)])
    return {}


def judged(test: Test, known: table.Table, run: Run) -> Row:
    """The row of a program, whatever becomes of it."""
    row, start = Row(test.name, known.forms_of(test.name)), time.perf_counter()
    wrong: dict[str, list[str]] = {}
    try:
        row.verdict, wrong = run(test)
    except Late:
        row.verdict, row.differences = HANG, ["it did not end in time"]
    except BrokenProcessPool as error:
        row.verdict, row.differences = DIED, [str(error)[:_WORDS]]
    except Exception as error:  # noqa: BLE001  (whatever it is, it is the verdict)
        row.verdict = REFUSED
        row.differences = [f"{type(error).__name__}: {error}"[:_WORDS]]
    row.seconds = round(time.perf_counter() - start, 3)
    if wrong:
        row.differences = [*dict.fromkeys(x[:_WORDS] for some in wrong.values() for x in some)]
    if row.failed:
        # A program of many instructions tells which of them differ; one that hangs does not.
        blamed = [form for form in row.forms if form in wrong or not wrong or " " in form]
        row.kernels = known.kernels_of(blamed)
    return row


def rows_of(tests: Iterable[Test], known: table.Table, run: Run) -> Iterator[Row]:
    """One after the other; after several that hung the others are not run."""
    hung = 0
    for test in tests:
        if hung >= MOST_HANGS:
            words = [f"the {MOST_HANGS} programs before it hung"]
            yield Row(test.name, known.forms_of(test.name), LEFT, words)
            continue
        row = judged(test, known, run)
        hung = hung + 1 if row.verdict == HANG else 0
        yield row


def perform(options: argparse.Namespace) -> int:
    """What the flags ask for; returns the exit code."""
    known = table.read(options.arch)
    gpu, emulator = Device(), Device()
    try:
        run: Run = partial(in_emulator, emulator, options.arch)
        setting = {"gpu": "none, the emulator alone", "target": options.arch}
        if not options.emulate:
            try:
                setting = gpu.ask(hw_runner.device)
            except Exception as error:  # noqa: BLE001  whatever keeps a GPU from answering
                return refuse(f"no GPU to compare with: {error}; --emulate needs none")
            if setting["target"] != options.arch:
                return refuse(f"{setting['gpu']} is {setting['target']}, not {options.arch}")
            run = partial(natively, gpu, emulator, options.arch)
        tests = [t for t in every(known.forms) if not options.only or _is_of(t, options.only)]
        rows = []
        for row in rows_of(tests, known, run):
            rows.append(row)
            _say(row)
        return _finish(options, setting, rows, known)
    finally:
        gpu.close()
        emulator.close()


def _is_of(test: Test, words: list[str]) -> bool:
    return any(word in test.name for word in words)


def _say(row: Row) -> None:
    print(f"{row.verdict:<14}{row.seconds:7.2f} s  {row.program}", flush=True)
    for words in row.differences:
        print(f"    {words}")
    if row.kernels:
        print(f"    used by {', '.join(row.kernels)}", flush=True)


def _finish(
    options: argparse.Namespace, setting: dict[str, str], rows: list[Row], known: table.Table
) -> int:
    counts = Counter(row.verdict for row in rows)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    untested = {form: reason for form, reason in known.untested().items()}
    for form, reason in untested.items():
        print(f"without a program: {form}: {reason}")
    if options.json:
        document = {"setting": setting, "rows": [asdict(row) for row in rows],
                    "untested": untested}  # fmt: skip
        write_json(options.json, document)
    return int(any(row.failed for row in rows))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m workbench.bringup.instructions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    words = "which architecture's kernels and programs; default: sm_100a"
    parser.add_argument("--arch", choices=table.ARCHS, default=table.ARCHS[0], help=words)
    parser.add_argument("--emulate", action="store_true", help="no GPU: the emulator alone")
    words = "programs whose name has one of these words; default: all"
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help=words)
    groups.add_json(parser, "a row for each program")
    return perform(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
