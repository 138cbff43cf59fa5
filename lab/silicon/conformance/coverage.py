"""Coverage of ptxemu's registry by the conformance programs, flag by flag and type by type.

An item of a form is one flag, or one combination of types. Each is witnessed by an opcode that
ran, refused for the GPU by the driver's compiler, or listed in `UNWITNESSED` with the reason.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from lab.silicon.conformance.elementwise import HEADER, module
from lab.silicon.conformance.patterns import expand
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
    (
        r"(wmma\..*|brx\.idx|atom b128|rcp f64|rsqrt f64) .*",
        "younger than the record: no GPU has been asked yet",
    ),
    (r"(call|ret)\.frame .*", "no instruction of PTX: what a call with a frame becomes"),
)

Item = tuple[str, str]  # (a form's name and types, a flag or a combination of types)


def describe(form: registry.Form) -> str:
    """A form's name and types, which tell the forms of one name apart: all but the two of
    tcgen05.mma, neither of which runs."""
    columns = ["|".join(sorted(column)) for column in form.types]
    return " ".join([form.name, *columns])


def items(form: registry.Form) -> set[Item]:
    """Return the items of a form to witness; a form without flags and types is an item itself."""
    name = describe(form)
    found = {(name, flag) for flag in form.flags}
    found |= {(name, ".".join(types)) for types in itertools.product(*form.types) if types}
    return found or {(name, "")}


def items_of(opcode: str) -> set[Item]:
    """Return the items that an instruction witnesses; none if ptxemu does not support it."""
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


# Instructions that sm_90a has and ptxemu refuses by name, each with the reason.
#
# `unavailable` is its opposite. The compiler is asked to take them, so the list cannot name what
# there is not; `tests/ptxemu/test_conformance.py` holds that ptxemu names each in its refusal.


_REGISTERS = """.reg .pred %p<4>; .reg .b16 %h<4>; .reg .b32 %r<16>; .reg .b64 %w<16>;
.reg .b128 %q<4>; .reg .f32 %f<16>; .reg .f64 %x<4>;"""
_MULTICAST = "memory of several GPUs at one address; a launch here has one"
_TEXTURE = "textures and surfaces are no memory that a tensor library hands to a kernel"
_VIDEO = "made of ordinary instructions since sm_50; no kernel of tensor cores has one"
_STACK = "memory of a size known at run time; compilers of kernels make arrays"

DECLINED: tuple[tuple[str, str], ...] = (
    ("fma.rn{|.relu}.oob.{f16|bf16} %h0, %h1, %h2, %h3", "for NaNs that a tensor map fills in"),
    ("fma.rn{|.relu}.oob.{f16x2|bf16x2} %r0, %r1, %r2, %r3", "for NaNs that a tensor map fills in"),
    ("multimem.ld_reduce.relaxed.gpu.global.add.f32 %f0, [%w0]", _MULTICAST),
    ("multimem.ld_reduce.global.add.v4.f32 {%f0, %f1, %f2, %f3}, [%w0]", _MULTICAST),
    ("multimem.st.relaxed.gpu.global.f32 [%w0], %f0", _MULTICAST),
    ("multimem.red.relaxed.gpu.global.add.f32 [%w0], %f0", _MULTICAST),
    ("v{add|sub|absdiff|min|max}.s32.u32.s32 %r0, %r1, %r2", _VIDEO),
    ("v{shl|shr}.u32.u32.u32.clamp %r0, %r1, %r2", _VIDEO),
    ("vmad.s32.s32.s32.sat %r0, %r1, %r2, %r3", _VIDEO),
    ("vset.u32.u32.lt %r0, %r1, %r2", _VIDEO),
    ("v{add|sub|avrg|absdiff|min|max}{2|4}.u32.u32.u32 %r0, %r1, %r2, %r3", _VIDEO),
    ("vset{2|4}.u32.u32.lt %r0, %r1, %r2, %r3", _VIDEO),
    ("tex.2d.v4.f32.f32 {%f0, %f1, %f2, %f3}, [%w0, {%f4, %f5}]", _TEXTURE),
    ("suld.b.1d.b32.trap %r0, [%w0, {%r1}]", _TEXTURE),
    ("txq.width.b32 %r0, [%w0]", _TEXTURE),
    ("istypep.texref %p0, %w0", _TEXTURE),
    ("alloca.u64 %w0, 16", _STACK),
    ("{stacksave|stackrestore}.u64 %w0", _STACK),
    (
        "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster",
        "one way of fence.proxy.async, whose other way is not known to the checker",
    ),
    (
        "fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster",
        "one way of fence.proxy.async, whose other way is not known to the checker",
    ),
    ("membar.proxy.alias", "memory has one address here"),
    ("mov.v2.b32 {%r0, %r1}, {%r2, %r3}", "two moves in one; no compiler was seen to write it"),
)


def instructions() -> list[str]:
    """The instructions, each with operands."""
    return [text for text, _ in with_reasons()]


def with_reasons() -> Iterator[tuple[str, str]]:
    for pattern, why in DECLINED:
        for text in expand(pattern):
            yield text, why


def question(chosen: Sequence[str]) -> tuple[str, int]:
    """A module with one instruction per line, and the line of the first; see `refusals`."""
    body = [_REGISTERS, *(f"{text};" for text in chosen)]
    return module((), body), HEADER.count("\n") + 4 + _REGISTERS.count("\n")
