"""The committed table of forms of instructions: the kernels that use each, programs that test it.

    python -m lab.bringup.table --arch sm_100a          write it anew
    python -m lab.bringup.table --arch sm_100a --check  is it what comes out of that now?

PYTHONPATH has `scripts` and the repository for it. Problems that cover the kernels are run in the
emulator, and programs. It takes minutes, and some more where the kernels have to be compiled first.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ptxemu

if TYPE_CHECKING:
    from lab.bringup.covering import Problem

# The other architectures of a bring-up read this one: 10.3 has the same kernels; on Hopper the same
# programs are a rehearsal, in which what it has not is refused.
WITH_TABLE = ("sm_100a",)
_NAMES = 2  # problems that are named, and programs
EVERY = ["all"]

# forms that need no program of their own -> why
UNTESTED: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Use:
    """Use of a form. kernels: module -> names of problems, or EVERY where all of it have the form.
    programs: some that hold it, first those whose outputs speak for it."""

    kernels: dict[str, list[str]]
    programs: list[str]


@dataclass(frozen=True)
class Table:
    arch: str
    forms: dict[str, Use]

    def untested(self) -> dict[str, str]:
        """Form -> reason, "" where there is none, of those without a program."""
        return {form: reason(form) for form, use in self.forms.items() if not use.programs}

    def kernels_of(self, forms: Iterable[str]) -> list[str]:
        """Name the kernels that use one of the forms, each with problems if not all of it do."""
        found: dict[str, list[str]] = {}
        for form in forms:
            for kernel, names in self.forms[form].kernels.items():
                if names == EVERY or found.get(kernel) == EVERY:
                    found[kernel] = EVERY
                else:
                    found[kernel] = [*dict.fromkeys([*found.get(kernel, []), *names])]
        return [
            kernel if names == EVERY else f"{kernel} ({'; '.join(names)})"
            for kernel, names in sorted(found.items())
        ]

    @property
    def kernels(self) -> set[str]:
        return {kernel for use in self.forms.values() for kernel in use.kernels}

    def text(self) -> str:
        """JSON with a line for each form."""
        lines = [
            f"  {json.dumps(form)}: {json.dumps(asdict(use))}"
            for form, use in sorted(self.forms.items())
        ]
        return f'{{\n "arch": "{self.arch}",\n "forms": {{\n' + ",\n".join(lines) + "\n }\n}\n"


def reason(form: str) -> str:
    """Why a form has no program, "" where nothing says so."""
    return next((why for pattern, why in UNTESTED if re.fullmatch(pattern, form)), "")


def path_of(arch: str) -> Path:
    """arch: one of `steps.ARCHS`."""
    return Path(__file__).parent / f"forms_{arch if arch in WITH_TABLE else WITH_TABLE[0]}.json"


def read(arch: str) -> Table:
    """The committed one."""
    content = json.loads(path_of(arch).read_text(encoding="utf-8"))
    forms = {form: Use(**use) for form, use in content["forms"].items()}
    return Table(content["arch"], forms)


# -- making it --------------------------------------------------------------------------------


def generated(arch: str, words: Collection[str] = ()) -> Table:
    """words: only problems whose name has one of these."""
    from lab.bringup.programs import every

    used, launched = _used(arch, words)
    programs: dict[str, list[str]] = defaultdict(list)
    for trial in every(used):
        for form in trial.forms(arch) & used.keys():
            of_it = form in trial.case.forms and not trial.checked  # then it comes first
            programs[form].insert(0 if of_it else len(programs[form]), trial.name)
    forms = {
        form: Use(
            {kernel: _some(names, launched[kernel]) for kernel, names in sorted(kernels.items())},
            programs[form][:_NAMES],
        )
        for form, kernels in used.items()
    }
    return Table(arch, forms)


def _some(names: list[str], every: set[str]) -> list[str]:
    """The first ones of these problems, and how many more there are."""
    if every <= {*names}:
        return EVERY
    left = len(names) - _NAMES
    return names[:_NAMES] + [f"{left} more"] * (left > 0)


Used = dict[str, dict[str, list[str]]]  # form -> kernel -> names of problems


def _used(arch: str, words: Collection[str]) -> tuple[Used, dict[str, set[str]]]:
    """Return the forms that kernels use, and for each kernel all problems that launch it."""
    from lab.bringup.covering import problems

    used: Used = defaultdict(lambda: defaultdict(list))
    launched: dict[str, set[str]] = defaultdict(set)
    for problem in problems(arch):
        if words and not any(word in problem.name for word in words):
            continue
        for kernel, forms in forms_by_kernel(problem, arch).items():
            launched[kernel].add(problem.name)
            for form in forms:
                used[form][kernel].append(problem.name)
    return used, launched


def forms_by_kernel(problem: Problem, arch: str) -> dict[str, set[str]]:
    """Module -> forms of its kernels that the problem launches, for the architecture, whichever
    they were launched for; nothing of a problem that is refused."""
    from kernelkit.call.launch import emulation
    from kernelkit.compile.aot import serves
    from kernelkit.compile.compiler import compile_once, forget, in_memory
    from lab.bringup.forms import forms_of_text, recording

    forget()  # what is in memory behind it, the problem has launched
    try:
        # However slow the host is: every problem counts.
        with recording() as heard, emulation(ptxemu.Options(limit=None), arch=arch):
            problem.launch()
    except (ValueError, NotImplementedError) as refusal:
        print(f"{problem.name}: refused: {refusal}"[:200], file=sys.stderr)
        return {}
    found: dict[str, set[str]] = defaultdict(set)
    for key, kernel in in_memory():
        own = {*re.findall(r"\.entry (\w+)", kernel.ptx)} & heard.keys()
        if own and serves(key.module, arch):
            compiled = compile_once(key.config, arch, key.source)
            found[key.module] |= forms_of_text(compiled.ptx).union(*(heard[name] for name in own))
        for name in own:
            heard[name] = set()
    if any(heard.values()):
        raise RuntimeError(f"{problem.name}: nothing is known of {[*filter(heard.get, heard)]}")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.bringup.table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arch", choices=WITH_TABLE, default=WITH_TABLE[0])
    parser.add_argument("--check", action="store_true", help="write nothing; show differences")
    options = parser.parse_args(arguments)
    made, path = generated(options.arch), path_of(options.arch)
    if not options.check:
        path.write_text(made.text(), encoding="utf-8")
        left = [form for form, why in made.untested().items() if not why]
        print(f"{path}: {len(made.forms)} forms of {len(made.kernels)} kernels")
        print("\n".join(f"without a program: {form}" for form in left))
        return int(bool(left))
    old, new = ({*text.splitlines()} for text in (path.read_text(), made.text()))
    for sign, lines in (("-", old - new), ("+", new - old)):
        print("\n".join(f"{sign} {line.strip()}" for line in sorted(lines)))
    return int(old != new)


if __name__ == "__main__":
    sys.exit(main())
