"""Which part of ptxemu's registry the conformance programs reach, flag by flag and type by type.

An item of a form is one flag, or one combination of types. Each is witnessed by an opcode that
ran, refused for the GPU by the driver's compiler, or listed in `UNWITNESSED` with the reason.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from ptxemu.errors import UnsupportedPtx
from ptxemu.ops import registry
from ptxemu.syntax.tree import Instr

# (pattern of "name types item", why nothing can witness it)
UNWITNESSED: tuple[tuple[str, str], ...] = (
    (r"isspacep (const|param|param::entry)", "constants and parameters are global memory here"),
    (r"cvta(\.to)? \S+ u32", "32-bit addresses are for modules of .address_size 32"),
    (r"(trap|brkpt).*", "ends the program"),
    (r"fence\.proxy async\..*", "two words of an opcode in one flag: `async` and the space are"),
    (r"prefetch const", "a hint for a tensor map in constant memory, which no host can put there"),
    (r"st .* param::entry", "a kernel does not write its parameters; ptxas refuses it"),
    (r"mma\.sp.* f16 e4m3\|e5m2 e4m3\|e5m2 f16 .*", "of sm_120a alone"),
    (r"mma\.sp.* .*(e2m1|e2m3|e3m2).*", "of sm_120a alone"),
    (r"mma\.sync f16\|f32 f16 f16 f16\|f32 f16\.f16\.f16\.f32", "refused: no such product"),
    (r"(ldmatrix (b8|b8x16 .*)|mma\.sync f(16|32) e2m1.*) .*", "as tcgen05.cp"),
    (r"cp\.async\.bulk(\.prefetch)?\.tensor tile::(gather4|scatter4)", "as tcgen05.cp"),
    (r"tcgen05\.(mma\.sp|mma\.ws(\.sp)?|shift) .*", "as tcgen05.cp"),
    (r"cp\.async\.bulk(\.prefetch)?\.tensor im2col::w(::128)?", "refused: see ops/tensor_copy.py"),
    (
        r"tensormap\.replace\.tile \S+ \S+ "
        r"(rank|box_dim|element_stride|elemtype|fill_mode|interleave_layout|swizzle_\w+)",
        "younger than the record: no GPU has been asked yet",
    ),
    (r"(tcgen05\.cp|stmatrix b8) .*", "no instruction of sm_90a"),
)

Item = tuple[str, str]  # (a form's name and types, a flag or a combination of types)


def describe(form: registry.Form) -> str:
    """A form's name and types, which tell the forms of one name apart: all but the two of
    tcgen05.mma, neither of which runs."""
    columns = ["|".join(sorted(column)) for column in form.types]
    return " ".join([form.name, *columns])


def items(form: registry.Form) -> set[Item]:
    """What there is to witness of a form; of one without flags and types, itself."""
    name = describe(form)
    found = {(name, flag) for flag in form.flags}
    found |= {(name, ".".join(types)) for types in itertools.product(*form.types) if types}
    return found or {(name, "")}


def items_of(opcode: str) -> set[Item]:
    """What an instruction witnesses; nothing where ptxemu does not know it."""
    opcode = opcode.removesuffix(" of three")
    try:
        match = registry.match(Instr(opcode, (), None, 0, opcode))
    except UnsupportedPtx:
        return set()
    name = describe(match.form)
    found = {(name, flag) for flag in match.flags}
    if match.types:
        found.add((name, ".".join(match.types)))
    return found or {(name, "")}


def everything() -> set[Item]:
    """Every item of the registry."""
    return set().union(*(items(form) for form in registry.supported()))


def witnessed(opcodes: Iterable[str]) -> set[Item]:
    return set().union(*(items_of(opcode) for opcode in opcodes))


def reason(item: Item) -> str:
    """Why an item cannot be witnessed, "" where nothing says so."""
    text = f"{item[0]} {item[1]}"
    return next((why for pattern, why in UNWITNESSED if re.fullmatch(pattern, text)), "")


def missing(ran: Iterable[str], refused: Iterable[str]) -> dict[Item, str]:
    """Item -> reason for all that did not run and was not refused, "" where it should have run.

    Of a form none of whose instructions can run, a refused one stands for all flags.
    """
    seen = witnessed(ran)
    said = witnessed(refused)
    dead = {name for name, _ in said} - {name for name, _ in seen}
    left = {item for item in everything() - seen - said if item[0] not in dead}
    return {item: reason(item) for item in sorted(left)}
