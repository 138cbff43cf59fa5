"""tensormap.replace and tensormap.cp_fenceproxy: PTX ISA "tensormap.replace",
"tensormap.cp_fenceproxy".

A tensor map is edited as 128 bytes in shared or global memory; an instruction that uses it reads it
when it is issued.
"""

from __future__ import annotations

import numpy as np

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.codegen.values import constant
from ptxemu.machine.cta import OFFSET_MASK
from ptxemu.machine.tensor_map import replace_field
from ptxemu.machine.warp import Warp
from ptxemu.numerics.lanes import PerLane
from ptxemu.ops.load_store import address_value, space_of
from ptxemu.ops.tensor_copy import MAP_BYTES
from ptxemu.syntax.tree import Imm, Instr

_FIELDS = "global_address global_dim global_stride"


@op(
    "tensormap.replace.tile",
    types=("b1024", "b32 b64"),
    flags=f"{_FIELDS} global shared::cta",
    section="tensormap.replace",
)
def replace(c: Lower, i: Instr, f: Match) -> None:
    """[map], {ordinal,} value."""
    field, space = f.pick(*_FIELDS.split()), space_of(f)
    ordinal = i.operands[1].value if isinstance(i.operands[1], Imm) and len(i.operands) > 2 else 0
    value = c.src(i.operands[-1], f.types[1].replace("b", "u"))
    c.effect(
        f"tensormap_replace(w, '{space}', {{0}}, ('{field}', {ordinal}), {{1}})",
        address_value(c, i.operands[0], space),
        value,
    )


@op(
    "tensormap.cp_fenceproxy.global.shared::cta",
    flags="tensormap::generic release acquire gpu cta cluster sys sync aligned",
    section="tensormap.cp_fenceproxy",
    convergent=True,
)
def copy_fence(c: Lower, i: Instr, f: Match) -> None:
    """Copy a map from shared to global memory and make it visible to TMA."""
    size = c.src(i.operands[2], "u32") if len(i.operands) > 2 else constant(MAP_BYTES, "u32")
    c.effect(
        "tensormap_copy(w, {0}, {1}, {2})",
        c.address(i.operands[0], 64),
        c.address(i.operands[1], 32),
        size,
    )


@runtime
def tensormap_replace(
    w: Warp, space: str, address: PerLane, what: tuple[str, int], value: PerLane
) -> None:
    """what: (field, ordinal). Every active lane edits; lanes that agree do the same again."""
    for where, new in dict.fromkeys(w.each_lane(address, value)):
        if space == "global":
            at = np.array([where], np.int64)
            raw = w.machine.memory.read_rows(at, MAP_BYTES)[0]
            replace_field(raw, *what, new)
            w.machine.memory.write_rows(at, raw[None])
        else:
            offset = where & OFFSET_MASK
            w.cta.check(offset, MAP_BYTES)
            replace_field(w.cta.smem[offset : offset + MAP_BYTES], *what, new)


@runtime
def tensormap_copy(w: Warp, target: PerLane, source: PerLane, nbytes: PerLane) -> None:
    where, start, size = (w.lane_values(value)[0] for value in (target, source, nbytes))
    offset = start & OFFSET_MASK
    w.cta.check(offset, size)
    raw = w.cta.smem[offset : offset + size]
    w.machine.memory.write_rows(np.array([where], np.int64), raw[None])
