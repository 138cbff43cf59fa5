"""Instructions whose issue rate and latency are measured: a template of each, and its set-up.

{x}: the register of a chain. {w}: its partner, which takes turns with it, so that the compiler
cannot fold steps. {v}: one register for both. {k}: the number of the step. %r_y, %r_z: operands.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.silicon.units.ptx import BLACKWELL

NOTHING = ""
# addresses: %r_at is the lane's own place in shared memory, zeros behind it
FILL = """\
mov.u32 %r_fill, %r_tid;
FILL:
shl.b32 %r_at, %r_fill, 4;
add.u32 %r_at, %r_at, %r_smem;
st.shared.v4.b32 [%r_at], {0, 0, 0, 0};
mov.u32 %r_at, %ntid.x;
add.u32 %r_fill, %r_fill, %r_at;
setp.lt.u32 %p_fill, %r_fill, 2048;
@%p_fill bra FILL;
"""
SMEM = 32768
POINTERS = (
    FILL
    + """\
shl.b32 %r_at, %r_tid, 4;
add.u32 %r_at, %r_at, %r_smem;
bar.sync 0;
st.shared.v4.b32 [%r_at], {%r_at, %r_at, %r_at, %r_at};
"""
)
ROWS = (
    FILL
    + """\
and.b32 %r_turn, %r_never, 512;
shl.b32 %r_at, %r_lane, 4;
add.u32 %r_at, %r_at, %r_smem;
"""
)
OFF = "setp.eq.u32 %p_off, %r_tid, %r_never;\n"


def _lanes(stride: int) -> str:
    return FILL + f"mad.lo.u32 %r_at, %r_lane, {stride}, %r_smem;\n"


@dataclass(frozen=True)
class Instruction:
    """An instruction to measure.

    text: one step.
    sass: the SASS it becomes.
    start: initialises a chain's register, {x} {n}.
    setup: text before.
    latency, issue: whether each is measured.
    chains: independent chains for measuring issue.
    steps: steps of the shorter loop; the longer one has twice as many.
    per_step: instructions of a step that count.
    tail: the end of a round.
    results: letters of a step's registers that must be computed.
    arch: GPUs that have it; "" for all.
    """

    text: str
    sass: str
    setup: str = NOTHING
    start: str = "add.u32 {x}, %r_y, {n};"
    latency: bool = True
    issue: bool = True
    chains: int = 8
    steps: int = 64
    latency_steps: int = 32
    per_step: int = 1
    smem: int = 0
    sm_wide: bool = False
    sunk: bool = True
    tail: str = ""
    results: str = ""
    arch: str = ""


def _special(name: str, sass: str) -> Instruction:
    return Instruction(f"{name} {{v}}, {{v}};", sass)


def _of_pairs(text: str, sass: str) -> Instruction:
    """Instructions on pairs of two float32 in a register of 64 bits."""
    setup = "mov.b64 %d_y, {%r_y, %r_z};\nmov.b64 %d_z, {%r_z, %r_y};\n"
    start = "mov.b64 %d{n}, {{%r_y, %r_z}}; mov.u32 {x}, 0;"
    return Instruction(text, sass, setup, start, arch=BLACKWELL)


def _load(text: str, sass: str, setup: str, **how: object) -> Instruction:
    return Instruction(text, sass, setup, latency=False, smem=SMEM, sm_wide=True, sunk=False, **how)


_HMMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
_ROW = "{{{v}, {v}b, {v}c, {v}d}}"
INSTRUCTIONS: dict[str, Instruction] = {
    "fma.f32": Instruction("fma.rn.f32 {v}, {v}, %r_y, %r_z;", "FFMA"),
    "add.f32": Instruction("add.rn.f32 {v}, {v}, %r_y;", "FADD"),
    "mul.f32": Instruction("mul.rn.f32 {v}, {v}, %r_y;", "FMUL"),
    "fma.f32x2": _of_pairs("fma.rn.f32x2 %d{c}, %d{c}, %d_y, %d_z;", "FFMA2"),
    "add.f32x2": _of_pairs("add.rn.f32x2 %d{c}, %d{c}, %d_y;", "FADD2"),
    "fma.f16x2": Instruction("fma.rn.f16x2 {v}, {v}, %r_y, %r_z;", "HFMA2"),
    "fma.bf16x2": Instruction("fma.rn.bf16x2 {v}, {v}, %r_y, %r_z;", "HFMA2.BF16"),
    "add.s32": Instruction("add.s32 {x}, {x}, {w};", "IADD3 or IMAD.IADD"),
    "add.s32 of three": Instruction(
        "add.s32 %r_t{n}, {x}, {w}; add.s32 {x}, %r_t{n}, %r_y;", "IADD3"
    ),
    "add.s64": Instruction(
        "add.s64 %d{c}, %d{c}, %d{d};", "IADD3 IADD3.X", start="cvt.u64.u32 %d{n}, %r_y;",
        issue=False,
    ),
    "lop3": Instruction("lop3.b32 {x}, {x}, {w}, %r_y, 0xE8;", "LOP3"),
    "shf": Instruction("shf.l.wrap.b32 {x}, {x}, {w}, %r_z;", "SHF"),
    "mad.lo.s32": Instruction("mad.lo.s32 {v}, {v}, %r_y, %r_z;", "IMAD"),
    "mul.wide.u32": Instruction(
        "mov.b64 {{%r_l{n}, {v}}}, %d{c}; mul.wide.u32 %d{c}, {v}, %r_y;",
        "IMAD.WIDE.U32", start="cvt.u64.u32 %d{n}, %r_y; mov.u32 {x}, 0;",
    ),
    "min.f32": Instruction(
        "min.f32 {x}, {w}, %r_y; max.f32 {x}, {x}, %r_z;", "FMNMX", per_step=2
    ),
    "max.s32": Instruction("max.s32 {x}, {w}, %r_y; min.s32 {x}, {x}, %r_z;", "VIMNMX",
                           per_step=2),
    "setp selp": Instruction(
        "setp.lt.f32 %p{n}, {v}, %r_y; selp.b32 {v}, %r_z, {v}, %p{n};", "FSETP FSEL"
    ),
    "setp.s32 selp": Instruction(
        "setp.lt.s32 %p{n}, {v}, %r_y; selp.b32 {v}, %r_z, {v}, %p{n};", "ISETP SEL"
    ),
    "prmt": Instruction("prmt.b32 {x}, {x}, {w}, %r_z;", "PRMT"),
    "cvt.bf16x2.f32": Instruction("cvt.rn.bf16x2.f32 {x}, {x}, {w};", "F2FP"),
    "cvt.s32.f32": Instruction("cvt.rni.s32.f32 {v}, {v};", "F2I"),
    "cvt.f32.s32": Instruction("cvt.rn.f32.s32 {v}, {v};", "I2FP or I2F"),
    "cvt.rni.f32": Instruction("cvt.rmi.f32.f32 {v}, {v}; add.rn.f32 {v}, {v}, %r_y;", "FRND FADD"),
    "ex2": _special("ex2.approx.ftz.f32", "MUFU.EX2"),
    "lg2": _special("lg2.approx.ftz.f32", "MUFU.LG2"),
    "rcp": Instruction(
        "rcp.approx.ftz.f32 {v}, {v}; add.rn.f32 {v}, {v}, %r_y;", "MUFU.RCP FADD"
    ),
    "rsqrt": _special("rsqrt.approx.ftz.f32", "MUFU.RSQ"),
    "tanh": _special("tanh.approx.f32", "MUFU.TANH"),
    "popc": _special("popc.b32", "POPC"),
    "clz": _special("clz.b32", "FLO IADD"),
    "mov from special": Instruction(
        "setp.ne.u32 %p{n}, {v}, %r_never; @%p{n} mov.u32 %r_s{n}, %warpid; "
        "add.u32 {v}, {v}, %r_s{n};", "ISETP S2R IADD3", start="mov.u32 %r_s{n}, 0;"
        " add.u32 {x}, %r_y, {n};",
    ),
    "mov from clock": Instruction(
        "setp.ne.u32 %p{n}, {v}, %r_never; @%p{n} mov.u32 %r_s{n}, %clock; "
        "add.u32 {v}, {v}, %r_s{n};", "ISETP CS2R/S2UR IADD3", start="mov.u32 %r_s{n}, 0;"
        " add.u32 {x}, %r_y, {n};", issue=False,
    ),
    "clock64": Instruction(
        "mov.u64 %d_c{k}, %clock64; xor.b64 %d{c}, %d{c}, %d_c{k};", "CS2R LOP3 LOP3",
        start="cvt.u64.u32 %d{n}, %r_y; mov.u32 {x}, 0;", latency=False,
    ),
    "predicated off": Instruction("@%p_off fma.rn.f32 {v}, {v}, %r_y, %r_z;", "@P FFMA", OFF),
    "predicated off ex2": Instruction(
        "@%p_off ex2.approx.ftz.f32 {v}, {v};", "@P MUFU.EX2", OFF
    ),
    "bar.warp.sync": Instruction("bar.warp.sync -1;", "NOP", sunk=False),
    "shfl": Instruction("shfl.sync.bfly.b32 {v}, {v}, 1, 31, -1;", "SHFL", sm_wide=True),
    "shfl.idx": Instruction("shfl.sync.idx.b32 {v}, {v}, %r_z, 31, -1;", "SHFL.IDX", sm_wide=True),
    "redux": Instruction("redux.sync.add.u32 {v}, {v}, -1;", "REDUX MOV", sm_wide=True),
    "vote.ballot": Instruction(
        "setp.ne.u32 %p{n}, {v}, %r_y; vote.sync.ballot.b32 {v}, %p{n}, -1;", "ISETP VOTE",
    ),
    "ld.const": Instruction(
        "cvt.u64.u32 %d_o{k}, {v}; add.s64 %d_o{k}, %d_table, %d_o{k};"
        " ld.const.u32 {v}, [%d_o{k}];", "LDC", issue=False,
        start="mov.u64 %d_table, table; and.b32 {x}, %r_y, 4;",
    ),
    "ld.shared.b32 chain": Instruction(
        "ld.volatile.shared.b32 {v}, [{v}];", "LDS", POINTERS, "mov.b32 {x}, %r_at;",
        issue=False, smem=SMEM,
    ),
    "ld.shared.v2 chain": Instruction(
        "ld.volatile.shared.v2.b32 {{{v}, %r_u{k}}}, [{v}];", "LDS.64", POINTERS,
        "mov.b32 {x}, %r_at;", issue=False, smem=SMEM,
    ),
    "ld.shared.v4 chain": Instruction(
        "ld.volatile.shared.v4.b32 {{{v}, %r_u{k}, %r_m{k}, %r_q{k}}}, [{v}];", "LDS.128",
        POINTERS, "mov.b32 {x}, %r_at;", issue=False, smem=SMEM,
    ),
    "ldmatrix.x4 chain": Instruction(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r_u{k}, %r_m{k}, %r_q{k}, %r_o{k}}}, [{v}];"
        " add.u32 {v}, {v}, %r_u{k};", "LDSM IADD3", ROWS, "mov.b32 {x}, %r_at;", issue=False,
        smem=SMEM,
    ),
    "atom.shared chain": Instruction(
        "atom.shared.add.u32 {v}, [%r_at], {v};", "ATOMS", POINTERS, issue=False, smem=SMEM
    ),
    "mma.m16n8k16": Instruction(
        f"{_HMMA} {_ROW}, {{{{%r_y, %r_z, %r_y, %r_z}}}}, {{{{%r_z, %r_y}}}}, {_ROW};",
        "HMMA.16816",
        start="mov.b32 {x}, 0; mov.b32 {x}b, 0; mov.b32 {x}c, 0; mov.b32 {x}d, 0;",
    ),
}  # fmt: skip
WIDTHS = {"b32": 4, "v2.b32": 8, "v4.b32": 16}


def _vector(kind: str) -> str:
    names = [f"%r_{letter}{{k}}" for letter in "umqo"[: WIDTHS[kind] // 4]]
    return names[0] if kind == "b32" else f"{{{{{', '.join(names)}}}}}"


def _values(kind: str) -> str:
    names = ["%r_y", "%r_z", "%r_y", "%r_z"][: WIDTHS[kind] // 4]
    return names[0] if kind == "b32" else f"{{{{{', '.join(names)}}}}}"


def _accesses() -> dict[str, Instruction]:
    """Loads and stores of shared memory by width and by how many lanes meet in a bank."""
    made = {}
    for kind, width in WIDTHS.items():
        for ways in (1, 2, 4, 8):
            if ways > 1 and kind != "b32":
                continue
            name = f"{kind}" + f" {ways}-way conflict" * (ways > 1)
            setup, size = _lanes(width * ways), f".{8 * width}" * (width > 4)
            steps = {"b32": 48, "v2.b32": 24, "v4.b32": 16}[kind]
            load = f"ld.volatile.shared.{kind} {_vector(kind)}, [%r_at+{{o}}];"
            store = f"st.volatile.shared.{kind} [%r_at+{{o}}], {_values(kind)};"
            made[f"ld.shared.{name}"] = _load(load, f"LDS{size}", setup, steps=steps)
            made[f"st.shared.{name}"] = _load(store, f"STS{size}", setup)
    made["ldmatrix.x4"] = _load(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r_u{k}, %r_m{k}, %r_q{k}, %r_o{k}}},"
        " [%r_at+{o}];", "LDSM", ROWS, steps=14,
        tail="xor.b32 %r_at, %r_at, %r_turn;", results="umqo",
    )  # fmt: skip
    made["stmatrix.x4"] = _load(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r_at+{o}], {{%r_y, %r_z, %r_y, %r_z}};",
        "STSM", ROWS,
    )  # fmt: skip
    made["red.shared"] = _load("red.shared.add.u32 [%r_at+{o}], %r_y;", "ATOMS", _lanes(4))
    made["red.shared, one address"] = _load(
        "red.shared.add.u32 [%r_smem+{o}], %r_y;", "ATOMS", FILL, steps=16
    )
    return made


INSTRUCTIONS |= _accesses()
