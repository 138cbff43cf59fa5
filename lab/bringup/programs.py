"""The programs that test instructions: those of `tests/ptxemu/ptx`, those of the conformance cases
that hold a wanted form, and generated ones (`lab.bringup.programs`).

Names begin with where a program is from: `ptx/tensor_4d`, `memory/...`, `generated/...`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import ptxemu
from lab.bringup import products, transfers
from lab.bringup.forms import forms_of_module, recording
from lab.silicon.conformance import (
    atomics,
    barriers,
    copies,
    elementwise,
    everything,
    matrices,
    memory,
    misc,
    peers,
    tensors,
)
from lab.silicon.conformance.campaign import Outputs
from lab.silicon.conformance.case import Case, Output
from lab.silicon.conformance.kernel import opcodes
from lab.silicon.conformance.ptx_program import FOLDER, aimed_at, emulate, read

_STRUCTURED = (misc, memory, barriers, peers, copies, atomics, matrices, tensors)
_SLOT = "%warpid"  # a slot of the multiprocessor, which nothing fixes


@dataclass(frozen=True)
class Trial:
    """A program; checked: what it has to give is known without the emulator."""

    name: str
    case: Case
    checked: bool = False

    def emulated(self, arch: str) -> tuple[Outputs, set[str]]:
        """Emulate the program for this architecture. Return its outputs and all its forms,
        including those of instructions that did not run."""
        program = aimed_at(self.case.program, arch)
        module = ptxemu.load(program.text)
        with recording() as heard:
            found = emulate(program, module, ptxemu.Options(limit=None))
        return found, forms_of_module(module.tree).union(*heard.values())

    def forms(self, arch: str) -> set[str]:
        return self.emulated(arch)[1]


def every(wanted: Collection[str]) -> Iterator[Trial]:
    """The simple ones first. wanted: forms of kernels, those without tests left out; each is in one
    program at least, if there is one."""
    yield from from_files()
    left = {form for form in wanted if " " not in form}
    for name, case in _of_conformance(wanted):
        if not left:
            break
        if case.forms & left:
            left -= case.forms
            yield Trial(f"{name}/{case.name}", replace(case, recorded=False))
    dynamic = [form for form in wanted if " " in form or form.startswith("tcgen05.")]
    for case in cases([*dynamic, *left]):
        yield Trial(f"generated/{case.name}", case)


def from_files(names: str = "*") -> Iterator[Trial]:
    """Each with all of its outputs. names: a pattern."""
    for path in sorted(FOLDER.glob(f"{names}.ptx")):
        text = path.read_text()
        if _SLOT in text:
            continue
        program, forms = read(path), opcodes(text)
        outputs = {
            b.name: Output(f"{path.stem} {b.name}", forms, b.data.size)
            for b in program.outputs()
            if not b.tolerance
        }
        yield Trial(f"ptx/{path.stem}", Case(path.stem, program, outputs, recorded=False), True)


def _of_conformance(wanted: Collection[str]) -> Iterator[tuple[str, Case]]:
    """(where it is from, case): instructions of one line for exactly these forms, and then all."""
    chosen = [variant for variant in everything.variants() if variant.key in wanted]
    for case in elementwise.cases(chosen):
        yield "elementwise", case
    for module in _STRUCTURED:
        for case in module.cases():
            yield module.__name__.rpartition(".")[2], case


# Programs for forms that no file has: written from the line of the form, one or a few each.
#
# Products of the tensor core are of small numbers, whose sums are exact in any order: what differs
# is where an element is or what it means. Shared memory is filled with such elements wherever a
# descriptor may point, so that any layout can be asked about, and the emulator says what should
# come.


MAKERS = (transfers.cases, products.cases)


def cases(wanted: Collection[str]) -> Iterator[Case]:
    """Cases of the forms that these files know."""
    for make in MAKERS:
        yield from make(sorted(wanted))
