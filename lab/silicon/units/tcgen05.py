"""Blackwell's tensor core: rates of tcgen05.mma by kind, shape and place of A, commits until a wait
wakes, and tcgen05.cp.

All elements of A and B and all scale factors are 1, so that every element of D is K times the
instructions that were summed: that is looked at where the kernels run in the emulator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lab.silicon.units.benchmark import BYTES, CYCLES, Benchmark, Point
from lab.silicon.units.ptx import BLACKWELL, WARP, Kernel, Memory, Role
from lab.silicon.units.sync import TURN, initialise, wait

DATA = 1024  # where operands begin, behind barriers
SPAN = 128  # bytes of a row of an operand: four instructions
STEP_BYTES = 32  # of them one instruction reads
COLUMNS = 512
A_AT, SFA_AT, SFB_AT = 256, 288, 320  # columns behind D's
WARPS = 4
FILLED = 16 * WARPS * WARP  # bytes that all threads fill at a time
ROUNDS = 32
SMEM, TMEM = "shared memory", "tensor memory"
SWIZZLED = 2 << 61 | 1 << 46 | (1024 >> 4) << 32 | 1 << 16  # K-major, of 128 bytes
LOOKED = 1 << 18  # bytes of a buffer that has a word of each thread, whatever GPU it is
ONES = 0x3F803F80  # two bf16, and what tcgen05.cp moves


@dataclass(frozen=True)
class Kind:
    """Kind of an MMA.

    k: elements along K.
    ones, scales: words full of 1.
    word: instruction descriptor with formats only.
    blocks: number of scale factors of a row, as the instruction spells it."""

    k: int
    ones: int
    word: int
    scales: int = 0
    blocks: str = ""


_F32, _BF16, _E8M0, _PACKED = 1 << 4, 1 << 7 | 1 << 10, 1 << 23, 1 << 7 | 1 << 10
KINDS = {
    "f16": Kind(16, ONES, _F32 | _BF16),
    "f8f6f4": Kind(32, 0x38383838, _F32),
    "mxf8f6f4": Kind(32, 0x38383838, _E8M0, 0x7F7F7F7F, ".block_scale.scale_vec::1X"),
    "mxf4": Kind(64, 0x22222222, _E8M0 | _PACKED, 0x7F7F7F7F, ".block_scale.scale_vec::2X"),
    "mxf4nvf4": Kind(64, 0x22222222, _PACKED, 0x38383838, ".block_scale.scale_vec::4X"),
}


@dataclass(frozen=True)
class Shape:
    """Shape of one instruction: m rows of D by n columns, of so many CTAs; a: where A is."""

    kind: str = "f16"
    ctas: int = 1
    m: int = 128
    n: int = 128
    a: str = SMEM

    @property
    def rows(self) -> int:
        """Rows of A in each CTA."""
        return self.m // self.ctas

    @property
    def columns(self) -> int:
        """Columns of tensor memory, that D takes: a pair of 64 rows has halves of them in other
        lanes."""
        return self.n // 2 if self.ctas == 2 and self.rows == 64 else self.n

    def descriptor(self) -> int:
        """Descriptor of the instruction."""
        kind = KINDS[self.kind]
        rows = self.m >> 7 << 27 if kind.scales else self.m >> 4 << 24
        return kind.word | self.n >> 3 << 17 | rows

    def variant(self) -> dict[str, object]:
        return {"kind": self.kind, "ctas": self.ctas, "m": self.m, "n": self.n, "a": self.a}

    def text(self, step: int, enabled: str, a: str = "") -> str:
        """The instruction: its step along K, the predicate whether D is summed up."""
        kind, step = KINDS[self.kind], step % (SPAN // STEP_BYTES)
        operand = f"[%r_a{step}]" if (a or self.a) == TMEM else f"%d_a{step}"
        factors = ", [%r_sfa], [%r_sfb]" if kind.scales else ""
        return (
            f"tcgen05.mma.cta_group::{self.ctas}.kind::{self.kind}{kind.blocks} [%r_tmem],"
            f" {operand}, %d_b{step}, %r_idesc{factors}, {enabled};"
        )


def commit(ctas: int) -> str:
    """Commit of all that this thread has issued, to the first barrier."""
    arrives = "mbarrier::arrive::one.shared::cluster.b64"
    return f"tcgen05.commit.cta_group::{ctas}.{arrives} [%r_smem];"


def issued(lines: Sequence[str], ctas: int, label: str = "A") -> str:
    """Issue from one lane, with a commit for which the whole warp waits."""
    chosen = f"elect.sync %r_w|%p_one, -1;\n@!%p_one bra SENT{label};"
    return "\n".join([chosen, *lines, commit(ctas), f"SENT{label}:", wait(0, label), TURN])


def _filled(word: int, nbytes: int) -> str:
    """Shared memory from DATA on, by all threads, for the tensor core. All go round as often, as
    the compiler has to know: it takes warps for divergent for ever, and makes of each tcgen05.mma
    a loop over lanes."""
    return f"""\
mov.b32 %r_ones, {word};
mad.lo.u32 %r_at, %r_tid, 16, %r_smem;
mov.u32 %r_o, 0;
FILL:
st.shared.v4.b32 [%r_at+{DATA}], {{%r_ones, %r_ones, %r_ones, %r_ones}};
add.u32 %r_at, %r_at, {FILLED};
add.u32 %r_o, %r_o, {FILLED};
setp.lt.u32 %p_fill, %r_o, {nbytes};
@%p_fill bra.uni FILL;
fence.proxy.async.shared::cta;"""


OWN_LANES = """\
and.b32 %r_lanes, %r_warp, 3;
shl.b32 %r_lanes, %r_lanes, 21;
add.u32 %r_lanes, %r_lanes, %r_tmem;"""
WRITTEN = "tcgen05.wait::st.sync.aligned;"


def columns_of(word: int | str, first: int, count: int) -> str:
    """Fill `count` columns of the lanes of each warp; a multiple of 32, or one."""
    repeat = min(count, 32)
    value = f"mov.b32 %r_column, {word};\n" if isinstance(word, int) else ""
    register = "%r_column" if isinstance(word, int) else word
    values = ", ".join([register] * repeat)
    store = f"tcgen05.st.sync.aligned.32x32b.x{repeat}.b32"
    lines = [f"{store} [%r_lanes+{at}], {{{values}}};"
             for at in range(first, first + count, repeat)]  # fmt: skip
    return value + "\n".join(lines)


def _in_tmem(shape: Shape, word: int) -> str:
    """A, scale factors, and zeros where D is looked at."""
    kind = KINDS[shape.kind]
    lines = [OWN_LANES, columns_of(0, shape.columns - 1, 1), columns_of(word, A_AT, 32)]
    if kind.scales:
        lines.append(columns_of(kind.scales, SFA_AT, 64))
    return "\n".join([*lines, WRITTEN])


def looked_at(column: int) -> str:
    """The word of each thread's lane in a column to its place in the buffer."""
    return f"""\
{OWN_LANES}
tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r_found}}, [%r_lanes+{column}];
tcgen05.wait::ld.sync.aligned;
mov.u32 %r_w, %ntid.x;
mad.lo.u32 %r_w, %r_cta, %r_w, %r_tid;
mad.wide.u32 %d_w, %r_w, 4, %d_mem;
st.global.b32 [%d_w], %r_found;"""


def _operands(shape: Shape) -> str:
    """Registers of the thread that issues."""
    lines = [f"mov.b32 %r_idesc, {shape.descriptor()};", "setp.ne.u32 %p_on, %r_count, 0;",
             "setp.eq.u32 %p_off, %r_count, 0;"]  # fmt: skip
    for name, start in (("a", DATA), ("b", DATA + shape.rows * SPAN)):
        lines += [f"add.u32 %r_at, %r_smem, {start};", "shr.u32 %r_at, %r_at, 4;"]
        lines += ["cvt.u64.u32 %d_at, %r_at;", f"or.b64 %d_{name}0, %d_at, {SWIZZLED};"]
        lines += [f"add.u64 %d_{name}{k}, %d_{name}0, {2 * k};" for k in range(1, 4)]
    lines += [f"add.u32 %r_a{k}, %r_tmem, {A_AT + STEP_BYTES // 4 * k};" for k in range(4)]
    lines += [f"add.u32 %r_sfa, %r_tmem, {SFA_AT};", f"add.u32 %r_sfb, %r_tmem, {SFB_AT};"]
    return "\n".join(lines)


def mma_kernel(
    shape: Shape, body: str, summed: int, *, zeros: bool = False, per_sm: bool = False
) -> Kernel:
    """Repeat `body` in one warp, of the first CTA of a pair.

    summed: number of instructions that D sums in the end.
    zeros: whether A and B are zeros instead of ones."""
    word = 0 if zeros else KINDS[shape.kind].ones
    nbytes = (shape.rows + shape.n // shape.ctas) * SPAN
    role = Role(body, last=1, cta=0 if shape.ctas > 1 else -1, before=_operands(shape))
    setup = f"{initialise([1], shape.ctas)}\n{_filled(word, nbytes)}"
    return Kernel(
        (role,), setup, WARPS * WARP, grid=shape.ctas, cluster=shape.ctas, smem=DATA + nbytes,
        per_sm=per_sm, tmem=COLUMNS, filled=_in_tmem(shape, word),
        memory=Memory(LOOKED), after=looked_at(shape.columns - 1),
        answer=0.0 if zeros else KINDS[shape.kind].k * summed,
        answered=16 if shape.m == 64 else WARP,
    )  # fmt: skip


def rate_kernel(shape: Shape, steps: int, **how: bool) -> Kernel:
    """Issue `steps` instructions per commit; the wait for it ends the round."""
    lines = [shape.text(k, "%p_on" if k else "%p_off") for k in range(steps)]
    return mma_kernel(shape, issued(lines, shape.ctas), steps, **how)


def _rows_of(shape: Shape) -> Benchmark:
    points = tuple(Point(rate_kernel(shape, n), ROUNDS, ROUNDS * n) for n in (8, 16))
    unit = "cycles per instruction"
    return Benchmark("tcgen05", "tcgen05_mma", shape.variant(), unit, points, arch=BLACKWELL)


# (CTAs, M) -> N, as our kernels have them
SHAPES = {
    (1, 64): (64, 128),
    (1, 128): (16, 32, 64, 128, 192, 256),
    (2, 128): (128, 256),
    (2, 256): (64, 128, 256),
}
FEWER = {(1, 128): (64, 128, 256), (2, 256): (128, 256)}


def shapes() -> Iterator[Shape]:
    """Shapes of which rates are measured: bf16 in all shapes, other kinds and A in tensor memory in
    fewer."""
    for (ctas, m), columns in SHAPES.items():
        for n in columns:
            yield Shape(ctas=ctas, m=m, n=n)
    for kind in KINDS:
        for a in (SMEM, TMEM):
            if (kind, a) == ("f16", SMEM) or (KINDS[kind].scales and a == TMEM):
                continue
            for (ctas, m), columns in FEWER.items():
                for n in columns:
                    yield Shape(kind, ctas, m, n, a)


def until_wait() -> Iterator[Benchmark]:
    """Time from the first instruction of a commit to the end of the wait for it, one commit
    after the other."""
    for (ctas, m), columns in FEWER.items():
        for n in columns:
            for a in (SMEM, TMEM):
                for per_commit in (1, 4):
                    shape = Shape(ctas=ctas, m=m, n=n, a=a)
                    points = tuple(Point(_waits(shape, per_commit, steps), ROUNDS, ROUNDS * steps)
                                   for steps in (4, 8))  # fmt: skip
                    variant = {**shape.variant(), "per_commit": per_commit}
                    yield Benchmark("tcgen05", "tcgen05_until_wait", variant, CYCLES, points,
                                    arch=BLACKWELL)  # fmt: skip


def _waits(shape: Shape, per_commit: int, steps: int) -> Kernel:
    lines = []
    for step in range(steps):
        sent = [shape.text(k, "%p_on" if k else "%p_off") for k in range(per_commit)]
        lines.append(issued(sent, shape.ctas, f"A{step}"))
    return mma_kernel(shape, "\n".join(lines), per_commit)


def switches() -> Iterator[Benchmark]:
    """Instructions that take A from shared and from tensor memory in turn."""
    for n in (64, 128, 256):
        shape, points = Shape(n=n), []
        for steps in (8, 16):
            lines = [shape.text(k // 2, "%p_on" if k else "%p_off", TMEM if k % 2 else SMEM)
                     for k in range(steps)]  # fmt: skip
            made = mma_kernel(shape, issued(lines, 1), steps)
            points.append(Point(made, ROUNDS, ROUNDS * steps))
        unit = "cycles per instruction"
        yield Benchmark("tcgen05", "tcgen05_switch", {"n": n}, unit, tuple(points), arch=BLACKWELL)


# (shape, multicast) of tcgen05.cp -> rows, bytes of each, lanes of a warp that get one
COPIES = {
    ("128x256b", ""): (128, 32, WARP),
    ("128x128b", ""): (128, 16, WARP),
    ("64x128b", ".warpx2::02_13"): (64, 16, WARP),
    ("32x128b", ".warpx4"): (32, 16, WARP),
    ("4x256b", ""): (4, 32, 1),
}


def copies() -> Iterator[Benchmark]:
    """Measure copies from shared to tensor memory without a swizzle, by the bytes that are read."""
    for (shape, cast), (rows, nbytes, lanes) in COPIES.items():
        points = []
        plain = 1 << 46 | (128 >> 4) << 32 | rows << 16  # columns of 16 bytes lie rows apart
        before = f"""\
add.u32 %r_at, %r_smem, {DATA};
shr.u32 %r_at, %r_at, 4;
cvt.u64.u32 %d_at, %r_at;
or.b64 %d_from, %d_at, {plain};"""
        for steps in (8, 16):
            copy = f"tcgen05.cp.cta_group::1.{shape}{cast} [%r_tmem], %d_from;"
            role = Role(issued([copy] * steps, 1), last=1, before=before)
            size = max(rows * nbytes, FILLED)
            made = Kernel(
                (role,), f"{initialise([1])}\n{_filled(ONES, size)}", WARPS * WARP,
                smem=DATA + size, tmem=32, filled=f"{OWN_LANES}\n{columns_of(0, 0, 32)}\n{WRITTEN}",
                after=looked_at(0), answer=float(np.uint32(ONES).view(np.float32)), answered=lanes,
            )  # fmt: skip
            points.append(Point(made, ROUNDS, ROUNDS * steps))
        yield Benchmark("tcgen05", "tcgen05_cp", {"shape": shape + cast}, BYTES, tuple(points),
                        rows * nbytes, arch=BLACKWELL)  # fmt: skip


def benchmarks() -> Iterator[Benchmark]:
    for shape in shapes():
        yield _rows_of(shape)
    yield from until_wait()
    yield from switches()
    yield from copies()
