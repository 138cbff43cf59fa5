"""tcgen05.mma.ws and tcgen05.mma.ws.sp: PTX ISA, the sections of these names.

D of M = 32 and 64 takes all lanes, by parts of N (machine/umma_desc.py, `data_path`). Which buffer
collects B makes no difference to what is computed. The mask of columns of B that count as zero, and
the shift of the instruction descriptor, are refused unless they are zero.
"""

from __future__ import annotations

from ptxemu.codegen.lower import Lower, fields
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.errors import UnsupportedPtx
from ptxemu.machine.state import Warp
from ptxemu.numerics import PerLane
from ptxemu.ops.tcgen05_mma import Form, mma_operands, without_metadata
from ptxemu.syntax.tree import Addr, Imm, Instr

_KINDS = "kind::f16 kind::tf32 kind::f8f6f4 kind::i8"
_COLLECTOR = " ".join(
    f"collector::b{buffer}::{use}"
    for buffer in range(4)
    for use in ("fill", "use", "lastuse", "discard")
)


@op("tcgen05.mma.ws tcgen05.mma.ws.sp", flags=f"cta_group::1 {_KINDS} {_COLLECTOR}")
def multiply_stationary(c: Lower, i: Instr, f: Match) -> None:
    """[d], a-desc | [a], b-desc, {[metadata],} idesc, enable-input-d, {zero-column-mask}."""
    (target, a, b, idesc, enable, *mask), metadata = without_metadata(c, i)
    kind = f.pick(*_KINDS.split()).removeprefix("kind::")
    if not kind or "cta_group::1" not in f.flags:
        raise UnsupportedPtx(f"{i.opcode}: .cta_group::1 and a .kind are needed")
    form = Form(kind, 1, isinstance(a, Addr), scale_d=0, sparse=bool(metadata), stationary=True)
    if mask and not (isinstance(mask[0], Imm) and mask[0].value == 0):
        c.effect("require_no_mask(w, {0})", c.src(mask[0], "u64"))
    operands = [*mma_operands(c, target, a, b, idesc, enable), *metadata]
    c.effect(f"issue_mma(w, {tuple(form)}, ({fields(operands)}), ())", *operands)


@runtime
def require_no_mask(w: Warp, mask: PerLane) -> None:
    """Of the columns of B."""
    for (value,) in w.each_lane(mask):
        if value:
            raise UnsupportedPtx(f"tcgen05.mma.ws with zero-column mask {value:#x}")
