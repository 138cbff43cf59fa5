"""tcgen05.mma.sp: products element by element, placement of metadata, findings of the checker, and
refusals.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from string import Template

import numpy as np
import pytest

import ptxemu
from lab.silicon.conformance.exact_arithmetic import FORMATS, values_of
from lab.silicon.conformance.ptx_program import POLICIES, Buffer, Program, emulate
from ptxemu import watch
from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.findings import Finding
from ptxemu.machine.umma_desc import instr_desc, require_shape
from tests.ptxemu.kernels import DYNAMIC, HEAD
from tests.ptxemu.umma_operands import image_of, put_operand, random_codes

# PTX programs of tcgen05.mma.sp, and their results, by element.
#
# A CTA, or each of a pair, copies an image to shared memory and words to tensor memory, which
# include metadata, scale factors and perhaps A. Other words are all ones, which is no valid
# metadata. Two MMAs along K follow, and D is stored lane by lane. The places of metadata, and A
# with its zeros, are written down here row by row and group by group.

STEPS = 2
CODES = (0x4, 0x8, 0xC, 0x9, 0xD, 0x6, 0xE)  # for 2:4 and 4:8
HALVES = (0x4, 0xE)  # for tf32
_K = {"f16": 32, "tf32": 16, "f8f6f4": 64, "i8": 64, "mxf8f6f4": 64, "mxf4": 128, "mxf4nvf4": 128}
_FORMAT_CODES = {
    "f16": 0, "bf16": 1, "tf32": 2, "u8": 0, "s8": 1,
    "e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5,
}  # fmt: skip
_WORDS = 64  # columns of tensor memory after D that are written
_META, _SFA, _SFB, _A = 0, 4, 8, 32  # where each part begins
_MOVE = 8  # columns to scale factors of the second MMA, if those of one MMA fill their words
_A_COLUMNS = 8  # of one MMA
_SLOT = 16384  # bytes of shared memory of an operand of one MMA


TEXT = Template(
    HEAD
    + DYNAMIC
    + """\
.visible .entry sparse(.param .u64 image, .param .u64 words, .param .u64 d)
{
    .reg .pred %p<8>; .reg .b16 %h0; .reg .b32 %r<40>, %f<${n}>, %x<${words}>; .reg .b64 %rd<24>;
    ld.param.u64 %rd0, [image]; ld.param.u64 %rd1, [words]; ld.param.u64 %rd2, [d];
    mov.u32 %r0, %tid.x; mov.u32 %r3, %cluster_ctarank; mov.u32 %r1, dynamic;
    add.u32 %r9, %r1, ${nbytes}; setp.eq.u32 %p0, %r0, 0;
    @%p0 mbarrier.init.shared.b64 [%r9], 1;
    @%p0 fence.mbarrier_init.release.cluster;
    shr.u32 %r2, %r0, 5; setp.ne.u32 %p1, %r2, 0;
    @%p1 bra ALLOCATED;
    tcgen05.alloc.cta_group::${ctas}.sync.aligned.shared::cta.b32 [%r9+16], 512;
    tcgen05.relinquish_alloc_permit.cta_group::${ctas}.sync.aligned;
ALLOCATED:
    mad.wide.u32 %rd0, %r3, ${nbytes}, %rd0; mul.wide.u32 %rd3, %r0, 16; add.u64 %rd0, %rd0, %rd3;
    mad.lo.u32 %r4, %r0, 16, %r1; mul.lo.u32 %r5, %r0, 16;
COPY:
    ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd0];
    st.shared.v4.b32 [%r4], {%r10, %r11, %r12, %r13};
    add.u64 %rd0, %rd0, 2048; add.u32 %r4, %r4, 2048; add.u32 %r5, %r5, 2048;
    setp.lt.u32 %p2, %r5, ${nbytes};
    @%p2 bra COPY;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    ld.shared.b32 %r6, [%r9+16];
    add.u32 %r7, %r6, ${n};
    shl.b32 %r8, %r2, 21;
    mad.lo.u32 %r14, %r3, 128, %r0; mad.wide.u32 %rd1, %r14, ${row_bytes}, %rd1;
    ${loads}
    add.u32 %r15, %r7, %r8;
    tcgen05.st.sync.aligned.32x32b.x${words}.b32 [%r15], ${rest};
    tcgen05.wait::st.sync.aligned;
    tcgen05.fence::before_thread_sync;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    tcgen05.fence::after_thread_sync;
    setp.eq.u32 %p2, %r3, 0; and.pred %p2, %p2, %p0;
    @!%p2 bra WAIT;
    and.b32 %r16, %r1, 0x3ffff; shr.u32 %r16, %r16, 4; cvt.u64.u32 %rd10, %r16;
    mov.b16 %h0, 3;
    ${first}
    ${second}
    tcgen05.commit.cta_group::${ctas}.mbarrier::arrive::one.shared::cluster${multicast};
WAIT:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p7, [%r9], 0;
    @!%p7 bra WAIT;
    tcgen05.fence::after_thread_sync;
    add.u32 %r15, %r6, %r8;
    tcgen05.ld.sync.aligned.32x32b.x${n}.b32 ${d}, [%r15];
    tcgen05.wait::ld.sync.aligned;
    mad.wide.u32 %rd2, %r14, ${d_bytes}, %rd2;
    ${stores}
    tcgen05.fence::before_thread_sync;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    @%p1 exit;
    tcgen05.dealloc.cta_group::${ctas}.sync.aligned.b32 %r6, 512;
    ret;
}
"""
)


@dataclass
class Variant:
    """A program's parameters.

    m: rows over all CTAs.
    lane: first lane of those that 64 rows use.
    blocks: scale factors of a row in one MMA, 0 without.
    changes: words of the program, and their replacements.
    """

    kind: str = "f16"
    a: str = "f16"
    b: str = "f16"
    d: str = "f32"
    m: int = 128
    n: int = 32
    ctas: int = 1
    a_in_tmem: bool = False
    lane: int = 0
    mn_major: bool = False
    blocks: int = 0
    scale: str = "ue8m0"
    swizzle: str = "128B"
    stationary: bool = False
    changes: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        shape = f"m{self.m}n{self.n} cta{self.ctas} lane {self.lane} {self.swizzle}"
        flags = " A in TMEM" * self.a_in_tmem + " MN" * self.mn_major + " ws" * self.stationary
        scales = f" {self.blocks} {self.scale}" if self.blocks else ""
        return f"{self.kind} {self.a} {self.b} {self.d} {shape}{flags}{scales}"

    # -- numbers ----------------------------------------------------------------------------------

    @property
    def k(self) -> int:
        """K of one MMA."""
        return _K[self.kind]

    @property
    def rows(self) -> int:
        """Rows of one CTA."""
        return self.m // self.ctas

    @property
    def packed(self) -> bool:
        return self.kind in ("mxf4", "mxf4nvf4")

    @property
    def group(self) -> tuple[int, int, int]:
        """Elements of a group of A, number of kept ones, elements per index."""
        return {"tf32": (2, 1, 1)}.get(self.kind, (8, 4, 2) if self.packed else (4, 2, 1))

    @cached_property
    def numbers(self) -> dict[str, np.ndarray]:
        """Random codes: kept (m, K / 2), b (n, K), choice of metadata (m, groups), sfa, sfb."""
        rng = np.random.default_rng(self.m + self.n + self.ctas)
        depth = STEPS * self.k
        table = HALVES if self.kind == "tf32" else CODES
        low, high = (0x28, 0x50) if self.scale == "ue4m3" else (121, 134)
        return {
            "kept": _codes(rng, self.a, (self.m, depth // 2)),
            "b": _codes(rng, self.b, (self.n, depth)),
            "codes": rng.choice(np.array(table, np.uint8), (self.m, depth // self.group[0])),
            "sfa": rng.integers(low, high, (STEPS, self.m, self.blocks), dtype=np.uint8),
            "sfb": rng.integers(low, high, (STEPS, self.n, self.blocks), dtype=np.uint8),
        }

    def whole_a(self) -> np.ndarray:
        """A with its zeros, float64."""
        kept, codes = values_of(self.a, self.numbers["kept"]), self.numbers["codes"]
        size, stored, unit = self.group
        out = np.zeros((self.m, STEPS * self.k))
        for row in range(self.m):
            for g, code in enumerate(codes[row].tolist()):
                places = [code >> 3] if size == 2 else [code & 3, code >> 2]
                for which, place in enumerate(places):
                    for e in range(unit):
                        value = kept[row, stored * g + unit * which + e]
                        out[row, size * g + unit * place + e] = value
        return out

    def expected(self) -> np.ndarray:
        """D (m, n), float64."""
        a, b = self.whole_a(), values_of(self.b, self.numbers["b"])
        if self.blocks:
            for matrix, factors in ((a, "sfa"), (b, "sfb")):
                codes = self.numbers[factors]
                values = values_of("e4m3" if self.scale == "ue4m3" else "ue8m0", codes)
                wide = values.repeat(self.k // self.blocks, axis=2)  # (steps, rows, k)
                matrix *= wide.transpose(1, 0, 2).reshape(matrix.shape)
        return a @ b.T

    # -- placement --------------------------------------------------------------------------------

    @property
    def parts(self) -> int:
        """Parts of N in separate lanes, each with a copy of A and of the metadata."""
        return 128 // self.m if self.stationary else 1

    def lane_of(self, row: int) -> int:
        """Lane of a row of D and A; 64 rows use 16 lanes in every quarter."""
        if self.rows == 128 or self.stationary:
            return row
        return 32 * (row // 16) + row % 16 + self.lane

    def words(self, rank: int) -> np.ndarray:
        """Words that a CTA writes after D: uint32 (128, columns)."""
        out = np.full((128, _WORDS), 0xFFFFFFFF, np.uint32)
        halves = out.view(np.uint16).reshape(128, _WORDS, 2)
        codes = self.numbers["codes"].astype(np.uint32)[rank * self.rows :][: self.rows]
        quads = codes.reshape(self.rows, -1, 4) << np.arange(0, 16, 4, dtype=np.uint32)
        for row in range(self.rows):
            for j, bits in enumerate(quads[row].sum(axis=1).tolist()):
                if self.kind in ("f16", "tf32"):  # a lane has rows r and r + 8, of half of K
                    lane = self.lane_of(row - row % 16 + row % 8) + 8 * (j % 2)
                    halves[lane, _META + j // 2, row // 8 % 2] = bits
                else:
                    halves[self.lane_of(row), _META + j // 2, j % 2] = bits
        if self.blocks:
            self._scales(out, rank)
        if self.a_in_tmem:
            kept = self.numbers["kept"][rank * self.rows :][: self.rows]
            image = kept if self.kind in ("f8f6f4", "mxf8f6f4") else self._image(self.a, kept)
            columns = np.ascontiguousarray(image).view(np.uint32)
            for row in range(self.rows):
                out[self.lane_of(row), _A : _A + columns.shape[1]] = columns[row]
        return np.tile(out[: 128 // self.parts], (self.parts, 1))

    def _scales(self, out: np.ndarray, rank: int) -> None:
        """Put scale factors into the bytes from `blocks` times the step on of the rows' words, in
        every quarter of the lanes."""
        for name, start, first in (("sfa", _SFA, rank * 128), ("sfb", _SFB, 0)):
            codes = self.numbers[name][:, first:][:, : 128 if name == "sfa" else self.n]
            for step in range(STEPS):
                for row in range(codes.shape[1]):
                    column, byte = start + row // 32, 0
                    if self.blocks < 4:
                        byte = self.blocks * step
                    elif step:
                        column += _MOVE
                    for quarter in range(4):
                        word = out[32 * quarter + row % 32, column : column + 1].view(np.uint8)
                        word[byte : byte + self.blocks] = codes[step, row]

    def _image(self, fmt: str, codes: np.ndarray) -> np.ndarray:
        """Return codes as bytes, so that they can be laid out as bytes."""
        if fmt in ("e2m1", "e2m3", "e3m2"):
            return image_of("mxf4" if self.packed else "mxf8f6f4", fmt, codes)
        return codes

    def operands(self, rank: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Return shared memory of a CTA, and descriptors of A and B of each step, for an image at
        0."""
        smem, words = np.full(2 * STEPS * _SLOT, 0xFF, np.uint8), []
        rows = self.n // self.ctas
        atoms = "128B_ATOM_32B" if self.kind == "tf32" and self.mn_major else self.swizzle
        for step in range(STEPS):
            a = self.numbers["kept"][rank * self.rows :, step * self.k // 2 :]
            b = self.numbers["b"][rank * rows :, step * self.k :]
            a, b = a[: self.rows, : self.k // 2], b[:rows, : self.k]
            both = []
            for slot, fmt, codes in ((2 * step, self.a, a), (2 * step + 1, self.b, b)):
                image = self._image(fmt, codes)
                both.append(put_operand(smem, slot * _SLOT, image, atoms, self.mn_major))
            words.append((both[0], both[1]))
        return smem, words

    def idesc(self, step: int) -> int:
        packed = self.packed
        a, b = (1 if packed else _FORMAT_CODES[x] for x in (self.a, self.b))
        word = 1 << 2 | a << 7 | b << 10 | self.mn_major * (3 << 15) | self.n >> 3 << 17
        if self.blocks:
            byte = self.blocks * step % 4
            word |= byte << 4 | (self.scale == "ue8m0") << 23 | self.m >> 7 << 27 | byte << 29
            return word
        if self.kind in ("f16", "tf32"):
            word |= step % 2
        return word | {"f16": 0, "f32": 1, "s32": 2}[self.d] << 4 | self.m >> 4 << 24

    # -- the program ------------------------------------------------------------------------------

    def mma(self, step: int, descriptors: tuple[int, int]) -> str:
        """Return an MMA; %r6 and %r7: D and the columns after it, %rd10: the image's address
        / 16."""
        lane = self.lane << 16
        meta = _META + (0 if self.kind in ("f16", "tf32") else 2 * step)
        a = f"[%r7+{_A + _A_COLUMNS * step + lane}]" if self.a_in_tmem else "%rd11"
        scales, vector = "", ""
        if self.blocks:
            move = _MOVE * step * (self.blocks == 4)
            scales = f" [%r7+{_SFA + move}], [%r7+{_SFB + move}],"
            vector = ".block_scale" + {1: "", 2: ".block32", 4: ".block16"}[self.blocks]
        name = f"tcgen05.mma{'.ws' * self.stationary}.sp.cta_group::{self.ctas}.kind::{self.kind}"
        return (
            f"add.u64 %rd11, %rd10, {descriptors[0]:#x}; add.u64 %rd12, %rd10, {descriptors[1]:#x};"
            f" {name}{vector} [%r6+{lane}], {a}, %rd12, [%r7+{meta + lane}], {self.idesc(step):#x},"
            f"{scales} {step};"
        )

    def program(self) -> Program:
        images, words = [], []
        for rank in range(self.ctas):
            image, descriptors = self.operands(rank)
            images.append(image)
            words.append(self.words(rank))
        nbytes, n = images[0].size, self.n
        lines = [self.mma(step, descriptors[step]) for step in range(STEPS)]
        multicast = ".multicast::cluster.b64 [%r9], %h0" if self.ctas == 2 else ".b64 [%r9]"
        text = TEXT.substitute(
            ctas=self.ctas,
            nbytes=nbytes,
            n=n,
            words=_WORDS,
            row_bytes=4 * _WORDS,
            d_bytes=4 * n,
            first=lines[0],
            second=lines[1],
            rest=_registers("%x", _WORDS),
            d=_registers("%f", n),
            loads=" ".join(f"ld.global.b32 %x{k}, [%rd1+{4 * k}];" for k in range(_WORDS)),
            stores=" ".join(f"st.global.b32 [%rd2+{4 * k}], %f{k};" for k in range(n)),
            multicast=multicast,
        )
        for old, new in self.changes.items():
            assert old in text, old
            text = text.replace(old, new)
        params = [
            Buffer("image", np.concatenate(images)),
            Buffer("words", np.concatenate([part.reshape(-1) for part in words])),
            Buffer("d", np.zeros(self.ctas * 128 * n, np.uint32), np.zeros(0)),
        ]
        return Program("sparse", text, (self.ctas,), (128,), (self.ctas,), nbytes + 128, params)

    def d_of(self, out: np.ndarray) -> np.ndarray:
        """Return D (m, n) from the program's output, float64."""
        lanes, every = [self.lane_of(row) for row in range(self.rows)], out.reshape(-1, 128, self.n)
        words = every[:, lanes].reshape(self.m, self.n)
        if self.stationary:
            parts = every[0, :, : self.n // self.parts].reshape(self.parts, self.m, -1)
            words = parts.transpose(1, 0, 2).reshape(self.m, self.n)
        words = np.ascontiguousarray(words).view(np.uint32)
        if self.d == "f16":
            return (words & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64)
        return words.view(np.float32 if self.d == "f32" else np.int32).astype(np.float64)


def _codes(rng: np.random.Generator, fmt: str, shape: tuple[int, int]) -> np.ndarray:
    codes = random_codes(rng, fmt, shape)
    narrow = fmt in ("e2m1", "e2m3", "e3m2")
    return codes & np.uint8((1 << FORMATS[fmt].bits) - 1) if narrow else codes


def _registers(name: str, count: int) -> str:
    return f"{{{', '.join(f'{name}{k}' for k in range(count))}}}"


DENSE_FORMATS = {
    "f16": [("f16", "f16", "f32"), ("bf16", "bf16", "f32"), ("f16", "f16", "f16")],
    "tf32": [("tf32", "tf32", "f32")],
    "f8f6f4": [("e4m3", "e5m2", "f32"), ("e5m2", "e2m1", "f16"), ("e2m1", "e4m3", "f32"),
               ("e3m2", "e2m3", "f32")],
    "i8": [("s8", "u8", "s32"), ("u8", "u8", "s32")],
}  # fmt: skip
# M, CTAs, first lane: each layout of D
PATHS = [(128, 1, 0), (64, 1, 0), (64, 1, 16), (256, 2, 0), (128, 2, 0), (128, 2, 16)]
PLAIN = [
    Variant(kind, *formats, m=m, ctas=ctas, lane=lane, n=n)
    for kind, all_formats in DENSE_FORMATS.items()
    for formats, (m, ctas, lane), n in product(all_formats, PATHS, (32, 128))
]
MAJORS = [
    Variant(kind, *formats[0], m=128 * ctas, ctas=ctas, mn_major=True, n=64, swizzle=swizzle)
    for kind, formats in DENSE_FORMATS.items()
    for ctas, swizzle in ((1, "128B"), (2, "64B"))
]
SWIZZLES = [
    Variant(*formats, swizzle=swizzle)
    for formats in (("f16",), ("i8", "s8", "s8", "s32"))
    for swizzle in ("none", "64B")
]
IN_TENSOR_MEMORY = [
    Variant(kind, *formats[0], m=m, ctas=ctas, lane=lane, a_in_tmem=True)
    for kind, formats in DENSE_FORMATS.items()
    for m, ctas, lane in PATHS
]
SCALED = [
    Variant(kind, a, b, m=128 * ctas, ctas=ctas, a_in_tmem=tmem, blocks=blocks, scale=scale)
    for (kind, blocks, scale), ctas, tmem in product(
        (("mxf8f6f4", 1, "ue8m0"), ("mxf4", 2, "ue8m0"), ("mxf4nvf4", 2, "ue8m0"),
         ("mxf4nvf4", 4, "ue8m0"), ("mxf4nvf4", 4, "ue4m3")),
        (1, 2),
        (False, True),
    )
    for a, b in ([("e4m3", "e2m1"), ("e5m2", "e3m2")] if kind == "mxf8f6f4" else [("e2m1", "e2m1")])
]  # fmt: skip
STATIONARY = [
    Variant(kind, *formats[0], m=m, n=n, a_in_tmem=tmem, stationary=True)
    for kind, formats in DENSE_FORMATS.items()
    for m, n, tmem in product((32, 64, 128), (64, 128), (False, True))
]
EVERY = [*PLAIN, *MAJORS, *SWIZZLES, *IN_TENSOR_MEMORY, *SCALED, *STATIONARY]
# a few of every kind and layout
QUICK = [
    *PLAIN[::13],
    *MAJORS[::3],
    SWIZZLES[-1],
    *IN_TENSOR_MEMORY[4::9],
    *SCALED[::6],
    *STATIONARY[::11],
]
PAIR = Variant(m=256, ctas=2)


def run(variant: Variant, **options: object) -> tuple[np.ndarray, list[Finding]]:
    """Return D (m, n) and the findings."""
    made = variant.program()
    with watch.watched() as report:
        out = emulate(made, ptxemu.load(made.text), ptxemu.Options(**options))["d"]
    return variant.d_of(out), report.launches[0].findings


def replace_words(variant: Variant, changes: dict[str, str]) -> Variant:
    """Return the variant with the same numbers and other words in its program."""
    changed = replace(variant, changes=changes)
    changed.__dict__["numbers"] = variant.numbers
    return changed


def check(variant: Variant, **options: object) -> None:
    """Compare D up to the rounding of its type."""
    d, expected = run(variant, **options)[0], variant.expected()
    step = {"s32": 0.0, "f16": 2.0**-10, "f32": 2.0**-20}[variant.d]
    np.testing.assert_allclose(d, expected, rtol=step, atol=step * np.max(np.abs(expected)))


@pytest.mark.parametrize("variant", QUICK, ids=str)
def test_products(variant: Variant) -> None:
    check(variant)


@pytest.mark.parametrize("variant", EVERY, ids=str)
def test_every_product(variant: Variant) -> None:
    check(variant)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_schedule_gives_the_same(policy: str) -> None:
    for seed in range(2):
        check(PAIR, policy=policy, seed=seed)


def test_a_group_of_zeros_needs_no_metadata() -> None:
    """CUTLASS's compressors write 0b0000 for such a group; with a nonzero element its meaning is
    undefined."""
    variant = Variant("f8f6f4", "e4m3", "e4m3")
    variant.numbers["kept"][37, 6:8] = 0
    variant.numbers["codes"][37, 3] = 0xE
    expected = variant.expected()
    variant.numbers["codes"][37, 3] = 0x0
    np.testing.assert_allclose(run(variant)[0], expected, rtol=1e-5, atol=1e-5)
    variant.numbers["kept"][37, 7] = 0x38
    with pytest.raises(
        HardwareRefusal, match=r"0b0000 of row 37, group 3 .* must be one of 0b0100, "
    ):
        run(variant)


def test_lanes_that_are_disabled_keep_what_they_have() -> None:
    """Tensor memory is all ones before, which is NaN."""
    words = "{%r20, %r21, %r21, %r22}"
    changes = {
        "mov.b16 %h0, 3;": "mov.u32 %r20, 0x60; mov.u32 %r21, 0; mov.u32 %r22, 0x80000000;",
        "0x8080014, 0;": f"0x8080014, {words}, 0;",
        "0x8080015, 1;": f"0x8080015, {words}, 1;",
    }
    variant = Variant()
    d = run(replace_words(variant, changes))[0]
    kept = [5, 6, 127]
    assert np.isnan(d[kept]).all()
    expected = np.delete(variant.expected(), kept, 0)
    np.testing.assert_allclose(np.delete(d, kept, 0), expected, rtol=1e-5, atol=1e-5)


# -- the checker ----------------------------------------------------------------------------------

STORE = "tcgen05.st.sync.aligned.32x32b.x64.b32"
BEHIND_STORE = """barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    tcgen05.fence::after_thread_sync;
    setp"""
OVERWRITE = """WAIT: add.u32 %r15, %r7, %r8;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r15], {%x0}; tcgen05.wait::st.sync.aligned;"""


@pytest.mark.parametrize("variant", [PAIR, Variant("f8f6f4", "e4m3", "e4m3"), SCALED[0]], ids=str)
def test_a_right_program_is_not_reported(variant: Variant) -> None:
    assert not run(variant, check=True)[1]


def test_metadata_that_nobody_wrote() -> None:
    """The stored elements are zeros, so that the MMA is executed anyway."""
    for variant in (Variant(), Variant("i8", "s8", "s8", "s32")):
        variant.numbers["kept"][:] = 0
        _, found = run(replace_words(variant, {STORE: f"// {STORE}"}), check=True)
        (first, *_) = found
        assert first.check == "uninitialised"
        assert first.message.startswith("the sparsity metadata of an MMA gets data")
        assert first.accesses[0].first == variant.n, "the column"
        assert first.line
        assert {each.check for each in found} == {"uninitialised"}


RACES = {
    "no barrier": (BEHIND_STORE, "setp", "tcgen05.mma is not ordered after tcgen05.st"),
    "overwritten": ("WAIT:", OVERWRITE, "tcgen05.st is not ordered after tcgen05.mma"),
}


@pytest.mark.parametrize("name", RACES)
def test_races_on_metadata(name: str) -> None:
    old, new, told = RACES[name]
    variant = Variant()
    _, found = run(replace_words(variant, {old: new}), check=True)
    assert told in {each.message for each in found}, found
    assert {each.check for each in found} == {"race"}
    columns = {access.first for each in found for access in each.accesses}
    assert variant.n in columns <= {variant.n, variant.n + 1}, "those that the selectors name"


# -- refusals -------------------------------------------------------------------------------------

F16 = Variant()
# warp 0 stores metadata that differ from their copies
DIFFERENT = {
    "add.u32 %r15, %r7, %r8;": "add.u32 %r15, %r7, %r8; @!%p1 xor.b32 %x0, %x0, 0x88888888;"
}
N64, N192 = (f"{STATIONARY[0].idesc(0) + (extra << 17):#x}" for extra in (0, 16))
REFUSED: dict[str, tuple[Variant, dict[str, str], type[Exception], str]] = {
    "odd column": (F16, {"[%r7+0]": "[%r7+1]"}, HardwareRefusal, "column 0x21, must be even"),
    "other lanes": (
        Variant(m=64), {"[%r7+0]": "[%r7+0x100000]"}, HardwareRefusal,
        "its metadata at TMEM lane 16, D at lane 0",
    ),
    "dense descriptor": (F16, {"0x8080014": "0x8080010"}, HardwareRefusal, "sp with .* of a dense"),
    "dense instruction": (
        F16, {"mma.sp.": "mma.", " [%r7+0],": ""}, HardwareRefusal, "mma with .* of a sparse",
    ),
    "no metadata": (F16, {" [%r7+0],": ""}, UnsupportedPtx, "without the address of sparsity"),
    "wide lines": (replace(F16, swizzle="32B"), {}, UnsupportedPtx, "K-major operand of 64 bytes"),
    "M of a pair": (
        replace(SCALED[4], m=128), {}, HardwareRefusal, r"of M=128 N=32, must be M of \(256,\)",
    ),
    "copies": (STATIONARY[0], DIFFERENT, UnsupportedPtx, "differ between the parts of N"),
    "wide N": (STATIONARY[0], {N64: N192}, HardwareRefusal, r"N=192, must be .* of \(64, 128\)"),
    "family": (SCALED[-1], {"sm_100a": "sm_100f"}, UnsupportedPtx, "needs sm_100a"),
    "target": (F16, {"sm_100a": "sm_90a"}, UnsupportedPtx, "sm_100a or"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    variant, changes, error, told = REFUSED[name]
    with pytest.raises(error, match=told) as caught:
        run(replace_words(variant, changes))
    assert caught.value.line


@pytest.mark.parametrize(
    ("kind", "word", "error"),
    [
        ("f16", 0x8080016, UnsupportedPtx),  # a selector above 1
        ("f16", 0x8080011, HardwareRefusal),  # a selector of a dense MMA
        ("f8f6f4", 0x8080015, HardwareRefusal),
        ("i8", 0x8080025, HardwareRefusal),
        ("mxf8f6f4", 0x10080005, HardwareRefusal),
        ("mxf4", 0x10081484, HardwareRefusal),  # the other version of sparsity
        ("mxf4nvf4", 0x90080484, HardwareRefusal),  # K = 96
    ],
)
def test_descriptors_that_are_refused(kind: str, word: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        instr_desc(kind, word)


def test_shapes() -> None:
    """K is twice that of a dense MMA; N is the same."""
    desc = instr_desc("mxf4", 0x10080484)
    assert (desc.m, desc.n, desc.k, desc.a_k) == (256, 32, 128, 64)
    require_shape(desc, 2)
    with pytest.raises(HardwareRefusal):
        require_shape(desc, 1)
    assert instr_desc("tf32", 0x8080914).k == 16
