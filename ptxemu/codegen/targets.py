"""Which instructions a `.target` does not have, by their opcodes.

Sources: the "Target ISA Notes" of each instruction in the PTX ISA; ptxas of CUDA 13.5 was asked
about 1,131 forms for sm_80 to sm_121a. A module without a `.target` is not judged.
"""

from __future__ import annotations

import re
from functools import cache

from ptxemu.errors import UnsupportedPtx
from ptxemu.syntax.tree import Addr, Instr, Special

_TENSOR_CORE = (100, 101, 103, 110)  # data-centre Blackwell
_BLACKWELL = (*_TENSOR_CORE, 120, 121)
# opcodes; the first sm that has them, or those whose own targets, sm_90a and its like, have them
_NEEDS: tuple[tuple[re.Pattern[str], int | tuple[int, ...]], ...] = tuple(
    (re.compile(pattern), needs)
    for pattern, needs in (
        (r"tcgen05\.|.*\.cta_group::[12]", _TENSOR_CORE),
        (r"tcgen05\.mma\..*kind::i8", (100, 101, 110)),
        (r"wgmma\.", (90,)),
        (r"(setmaxnreg|tensormap\.replace)\.", (90, *_BLACKWELL)),
        (r"mma\..*\.kind::|mma\.sp.*\.f16\.e[45]m[23]\.", (120, 121)),
        (r"(ldmatrix|stmatrix)\..*\.b8(x16\.|$)", _BLACKWELL),
        (r"cvt\..*\.(e2m1|e2m3|e3m2|ue8m0)x2", _BLACKWELL),
        (r"redux\..*\.f32|cvt\.rs\.", (100, 103)),
        (r"cp\.async\.bulk\.tensor\..*tile::scatter4", _TENSOR_CORE),
        (r"cp\.async\.bulk\.tensor\..*shared::cluster.*tile::gather4", _TENSOR_CORE),
        (r"clusterlaunchcontrol\..*\.multicast::cluster::all\.", _BLACKWELL),
        (r"cp\.async\.bulk\..*tile::gather4|clusterlaunchcontrol\.", 100),
        (r"(add|sub|mul|fma)\.(.*\.)?f32x2|(ld|st)\..*\.(v8\.|v4\.[busf]64)", 100),
        (r"(add|sub|fma)\.(.*\.)?f32\.b?f16$|cvt\.r[nz]\.(relu\.)?satfinite\.tf32\.", 100),
        (r"(min|max)\..* of three$", 100),
        (r"mma\..*\.m16n8k\d+\..*\.f64$", 90),
        (r"cp\.(reduce\.)?async\.bulk|st\.async|(stmatrix|mapa|elect|griddepcontrol)\.", 90),
        (r"red\.async|(add|min|max)\.(relu\.)?[us]16x2|(min|max)\.relu\.s32|atom\..*b128", 90),
        (r"getctarank\.|prefetch\.tensormap|tensormap\.cp_fenceproxy|multimem\.", 90),
        (r".*\.(shared::)?cluster(\.|$)|.* of %(n?cluster|is_explicit|aggr_smem)", 90),
        (r"fence\.(proxy\.(async|tensormap)|mbarrier_init|acquire|release|.*sync_restrict)", 90),
        (r"mbarrier\.((.*\.)?(expect_tx|complete_tx|relaxed)\.|try_wait\.|.* with a count$)", 90),
        (r"(red|atom)\..*(\.v[248]\.|\.bf16(x2)?$)", 90),
        (r"(add|sub|mul|ex2|tanh)\.(.*\.)?bf16(x2)?$|setp?\..*\.bf16(x2)?(\.|$)", 90),
        (r"cvt\.(?!.*\.bf16(x2)?\.f32$|(.*\.)?f32\.bf16$).*\.bf16(\.|$)", 90),
        (r"cvt\.r[nz]\.(.*\.)?tf32\.", 90),
        (r"(mma|cvt)\..*\.(e4m3|e5m2)(x2)?(\.|$)", 89),
        (r"(min|max)\.(.*\.)?xorsign\.abs\.", 86),
    )
)
# what sm_100f and its like do not have
_NO_FAMILY = re.compile(
    r"tcgen05\.(shift\.|mma\..*(kind::i8|scale_vec::)|mma\.sp\..*kind::mxf4)|cvt\.rs\.",
)
_TARGET = re.compile(r"sm_(\d+)([af]?)$")


def require_target(instr: Instr, target: str) -> None:
    """Raises UnsupportedPtx, with its line, where `target` does not have the instruction."""
    what = instr.opcode + _more(instr)
    needed = _missing(what, target)
    if needed:
        raise UnsupportedPtx(
            f"{what} needs {needed}, and the module is of .target {target}",
            line=instr.line,
            text=instr.text,
        )


def _more(instr: Instr) -> str:
    """Return what operands say beyond the opcode."""
    special = next((x.name for x in instr.operands if isinstance(x, Special)), "")
    if special:
        return f" of {special}"
    if instr.root in ("min", "max"):
        return " of three" * (len(instr.operands) > 3)
    arrives = instr.root == "mbarrier" and instr.parts[1] in ("arrive", "arrive_drop")
    if arrives and instr.operands and not {"noComplete", "expect_tx"} & set(instr.parts):
        return " with a count" * (not isinstance(instr.operands[-1], Addr))
    return ""


@cache
def _missing(opcode: str, target: str) -> str:
    """What the opcode needs and the target is not; "" where it has it."""
    found = _TARGET.match(target)
    if found is None:
        return ""
    number, own = int(found[1]), bool(found[2])
    for pattern, needs in _NEEDS:
        if not pattern.match(opcode):
            continue
        if isinstance(needs, int):
            if number < needs:
                return f"sm_{needs}"
        elif not (own and number in needs) or (found[2] == "f" and _NO_FAMILY.match(opcode)):
            return " or ".join(f"sm_{each}a" for each in needs)
    return ""
