"""PTX programs of tcgen05.mma.sp, and what they compute, by element.

A CTA, or each of a pair, copies an image to shared memory and words to tensor memory, of which
metadata, scale factors and perhaps A are part; what is not part of them is all ones, as metadata no
group's. Two MMAs along K follow, and D is stored lane by lane. Where metadata lie, and what A is
with its zeros, is written down here row by row and group by group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from string import Template

import numpy as np

from lab.silicon.conformance.exact_arithmetic import FORMATS, values_of
from lab.silicon.conformance.ptx_program import Buffer, Program

from .umma_operands import image_of, put_operand, random_codes

STEPS = 2
CODES = (0x4, 0x8, 0xC, 0x9, 0xD, 0x6, 0xE)  # of 2:4 and 4:8
HALVES = (0x4, 0xE)  # of tf32
_K = {"f16": 32, "tf32": 16, "f8f6f4": 64, "i8": 64, "mxf8f6f4": 64, "mxf4": 128, "mxf4nvf4": 128}
_FORMAT_CODES = {
    "f16": 0, "bf16": 1, "tf32": 2, "u8": 0, "s8": 1,
    "e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5,
}  # fmt: skip
_WORDS = 64  # columns of tensor memory behind D that are written
_META, _SFA, _SFB, _A = 0, 4, 8, 32  # where the parts of them begin
_MOVE = 8  # columns to scale factors of the second MMA, where those of one fill their words
_A_COLUMNS = 8  # of one MMA
_SLOT = 16384  # bytes of shared memory of an operand of one MMA


TEXT = Template("""
.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
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
""")


@dataclass
class Variant:
    """m: of all CTAs. lane: the first of those that 64 rows use. blocks: scale factors of a row in
    one MMA, 0 without. changes: words of the program, and what stands there instead."""

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
        """Of one MMA."""
        return _K[self.kind]

    @property
    def rows(self) -> int:
        """Of one CTA."""
        return self.m // self.ctas

    @property
    def packed(self) -> bool:
        return self.kind in ("mxf4", "mxf4nvf4")

    @property
    def group(self) -> tuple[int, int, int]:
        """Elements of a group of A, how many are kept, how many an index stands for."""
        return {"tf32": (2, 1, 1)}.get(self.kind, (8, 4, 2) if self.packed else (4, 2, 1))

    @cached_property
    def numbers(self) -> dict[str, np.ndarray]:
        """kept (m, K / 2), b (n, K): codes; choice (m, groups): of metadata; sfa, sfb: codes."""
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

    # -- where they lie ---------------------------------------------------------------------------

    @property
    def parts(self) -> int:
        """Of N, that have lanes of their own, and a copy of A and of the metadata there."""
        return 128 // self.m if self.stationary else 1

    def lane_of(self, row: int) -> int:
        """Of D and A: of 64 rows, 16 in every quarter."""
        if self.rows == 128 or self.stationary:
            return row
        return 32 * (row // 16) + row % 16 + self.lane

    def words(self, rank: int) -> np.ndarray:
        """What a CTA writes behind D: uint32 (128, columns)."""
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
        """Byte `blocks` times the step and up, of the rows' words in every quarter of the lanes."""
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
        """Bytes that stand for themselves, so that they can be laid out as such."""
        if fmt in ("e2m1", "e2m3", "e3m2"):
            return image_of("mxf4" if self.packed else "mxf8f6f4", fmt, codes)
        return codes

    def operands(self, rank: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Shared memory of a CTA, and descriptors of A and B of each step, for an image at 0."""
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
        """One MMA; %r6 and %r7: D and what is behind it, %rd10: the image's address / 16."""
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
        """D (m, n) of what the program stored, float64."""
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
