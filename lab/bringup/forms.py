"""Forms of instructions in a launch: those in its PTX, and those that only its run shows.

A form is a line of text. An instruction is its opcode with all modifiers. Where registers decide
what an instruction is, the emulator is listened to:

    mma f16 cta_group::1 m128 n64 k16 bf16 x bf16 -> f32, A 128B K, B 128B MN 1024/2048
        kind, shape of all CTAs, types, and where A and B lie: the swizzle of shared memory, the
        major dimension and, where the layout reads them, the byte offsets LBO/SBO; or TMEM. Behind
        them scale factors, and what is rare: a column of D that no 16 divides, lanes disabled
    tcgen05.cp 32x128b warpx4 cta_group::1 none 16/128
    tensor map 2d bf16 128B loads           rank, type, swizzle and direction of a TMA copy
    tcgen05.alloc cta_group::1 of 512 columns
    cluster of 2, mbarrier expects 0 bytes

Both kernels and the programs that test instructions are recorded by this file, so that a form of
a kernel is tested where a program has the same line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from ptxemu.machine.async_ops import Work
from ptxemu.machine.listener import Listener, Place, Position
from ptxemu.machine.machine import Machine
from ptxemu.machine.mbarrier import MBarrier
from ptxemu.machine.mma import Mma
from ptxemu.machine.state import Cta, Warp
from ptxemu.machine.tensor_map import TensorMap
from ptxemu.machine.tmem_fill import SHAPES, Fill
from ptxemu.machine.umma_desc import SmemDesc
from ptxemu.syntax.parser import parse
from ptxemu.syntax.tree import Entry, Instr, ModuleTree

_COLUMNS = 16  # what nearly every kernel known aligns its accumulators to


@dataclass(eq=False)
class Heard(Listener):
    """Adds what is not in the text of a kernel to its forms."""

    forms: set[str]

    every_access = False

    def multiply(self, work: Work, ctas: Sequence[Cta], mma: Mma) -> None:
        self.forms.add(form_of_mma(mma, len(ctas)))

    def fill(
        self, work: Work, ctas: Sequence[Cta], address: int, desc: SmemDesc, shape: Fill
    ) -> None:
        names = {(each.rows, each.nbytes, each.run): " ".join(k) for k, each in SHAPES.items()}
        name = names[shape.rows, shape.nbytes, shape.run].strip()
        narrow = f" from {shape.narrow} bits" if shape.narrow else ""
        where = f"{desc.swizzle.name} {desc.leading}/{desc.stride}"
        self.forms.add(f"tcgen05.cp {name} cta_group::{len(ctas)} {where}{narrow}")

    def columns_allocated(self, w: Warp, column: int, count: int, pair: bool, told: int) -> None:
        self.forms.add(f"tcgen05.alloc cta_group::{1 + pair} of {count} columns")

    def mbarrier_expected(self, w: Warp, cta: Cta, barrier: MBarrier, nbytes: int) -> None:
        if nbytes == 0:
            self.forms.add("mbarrier expects 0 bytes")

    def tile_loaded(
        self, work: Work, tm: TensorMap, position: Position, places: list[Place]
    ) -> None:
        self.forms.add(_form_of_map(tm, "loads"))

    def tile_write(self, work: Work, tm: TensorMap, position: Position, image: np.ndarray) -> None:
        self.forms.add(_form_of_map(tm, "stores"))

    def tile_reduce(self, work: Work, tm: TensorMap, position: Position) -> None:
        self.forms.add(_form_of_map(tm, "reduces"))


def form_of_mma(mma: Mma, ctas: int) -> str:
    """Everything that decides what a tensor core does, but for the data and their places."""
    instr = mma.instr
    kind = f"{instr.kind}{'.ws' * instr.stationary}{'.sp' * instr.sparse}"
    types = f"{instr.a_format} x {instr.b_format} -> {instr.d_format}"
    parts = [
        f"mma {kind} cta_group::{ctas} m{instr.m} n{instr.n} k{instr.k} {types}",
        f"A {_operand(mma.a, instr.a_mn_major)}",
        f"B {_operand(mma.b, instr.b_mn_major)}",
    ]
    if mma.scales is not None:
        ids = sorted({instr.a_scale_id, instr.b_scale_id})
        where = f" ids {instr.a_scale_id} {instr.b_scale_id}" if any(ids) else ""
        parts.append(f"{mma.scales.blocks} {instr.scale_format} scales{where}")
    odd = (mma.d & 0xFFFF) % _COLUMNS
    rare = {
        f"D at column {odd} of {_COLUMNS}": odd,
        f"D at lane {mma.d >> 16}": mma.d >> 16,
        "lanes disabled": any(mma.disable_lanes),
        "D scaled": mma.scale_input_d,
        "shifted": mma.shift,
        "A negated": instr.a_negate,
        "B negated": instr.b_negate,
        "saturated": instr.saturate,
    }
    return ", ".join([*parts, *(what for what, is_so in rare.items() if is_so)])


def _operand(where: SmemDesc | int, mn_major: bool) -> str:
    """Swizzled and K-major, LBO is not read."""
    if isinstance(where, int):
        return "TMEM"
    steps = f"{where.leading}/" if mn_major or not where.swizzle.bits else ""
    return f"{where.swizzle.name} {'MN' if mn_major else 'K'} {steps}{where.stride}"


def _form_of_map(tm: TensorMap, what: str) -> str:
    mode = "im2col " if tm.pixels else "gathered " if tm.gathers else ""
    filled = " NaN" if tm.nan_fill else ""
    return f"tensor map {tm.rank}d {mode}{tm.dtype} {tm.swizzle.name}{filled} {what}"


def forms_of_entry(entry: Entry) -> set[str]:
    """The opcodes of a kernel, also of instructions that a run does not come to."""
    return {instr.opcode for instr in entry.body if isinstance(instr, Instr)}


def forms_of_module(tree: ModuleTree) -> set[str]:
    """Return the forms of all kernels of a module."""
    return set().union(*(forms_of_entry(entry) for entry in tree.entries.values()))


def forms_of_text(text: str) -> set[str]:
    """Return the forms of all kernels in PTX text."""
    return forms_of_module(parse(text))


@contextmanager
def recording() -> Iterator[dict[str, set[str]]]:
    """Within the block every launch in the emulator is recorded: entry -> forms."""
    found: dict[str, set[str]] = {}
    begin = Machine.__init__

    def begun(machine: Machine, program: Any, *rest: Any) -> None:
        """rest: as `Machine` takes it, with the listeners at its end."""
        ears = Heard(found.setdefault(program.entry.name, forms_of_entry(program.entry)))
        begin(machine, program, *rest[:5], (*rest[5], ears))
        ctas = int(np.prod(machine.shape.cluster))
        if ctas > 1:
            ears.forms.add(f"cluster of {ctas}")

    with mock.patch.object(Machine, "__init__", begun):
        yield found
