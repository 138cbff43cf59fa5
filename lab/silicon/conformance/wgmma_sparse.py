"""wgmma.mma_async.sp: as `wgmma`, of a sparse A; selectors, layouts and sources of A take turns.

Half of each row of A is stored. Every group of metadata is drawn from all that the manual gives a
meaning; lanes that a selector does not name hold what would be wrong. Which lane has which rows is
written down after the manual's figures, lane by lane. PTX ISA: "Sparse matrix storage" of
wgmma.mma_async.sp.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lab.silicon.conformance.case import Case
from lab.silicon.conformance.ptx_program import Buffer, Program
from lab.silicon.conformance.values import below, random_words
from lab.silicon.conformance.wgmma import GRID, SPANS, M, Variant, program

_ALL_N, _INTEGER_N = tuple(range(8, 257, 8)), (8, 24, *range(16, 257, 16))
_EIGHT = [f"{a}.{b}" for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")]
_INTEGERS = [f"s32.{a}.{b}" for a in ("s8", "u8") for b in ("s8", "u8")]
# types of D, A and B that take turns, and N
_FORMS: tuple[tuple[list[str], tuple[int, ...]], ...] = (
    (["f32.f16.f16", "f16.f16.f16"], _ALL_N),
    (["f32.bf16.bf16"], _ALL_N),
    (["f32.tf32.tf32"], _ALL_N),
    ([f"{d}.{types}" for types in _EIGHT for d in ("f32", "f16")], _ALL_N),
    (_INTEGERS, _INTEGER_N),
    ([f"{types}.satfinite" for types in _INTEGERS], _INTEGER_N),
    (["satfinite.s32.s8.u8"], (16,)),
)
_PAIRS = [(x, y) for x in range(4) for y in range(4) if x != y]  # places of the two that are kept
_HALVES = (0b0100, 0b1110)  # of tf32: the first of two is kept, the second
_WRONG = 0xFFFFFFFF  # metadata that no group may have


@dataclass(frozen=True)
class Sparse(Variant):
    """selector: which lanes of four bring the metadata."""

    selector: int = 0

    @property
    def k(self) -> int:
        return 2 * super().k

    @property
    def a_k(self) -> int:
        return self.k // 2

    @property
    def opcode(self) -> str:
        return super().opcode.replace("mma_async", "mma_async.sp")

    @property
    def name(self) -> str:
        return super().name.replace("wgmma", "wgmma.sp") + f" {self.selector}"

    @property
    def more(self) -> str:
        return f", %e<{self.steps}>"

    @property
    def _drawn(self) -> np.ndarray:
        """(grid, 64, groups of all operations): numbers of what is in the tables above."""
        size = 2 if self.bits == 32 else 4
        shape = (GRID, M, self.k * self.steps // size)
        choices = len(_HALVES) if self.bits == 32 else len(_PAIRS)
        return below(f"{self.name} e", int(np.prod(shape)), choices).reshape(shape)

    def whole(self, a: np.ndarray) -> np.ndarray:
        drawn = self._drawn
        if self.bits == 32:
            return np.stack([np.where(drawn == place, a, 0) for place in (0, 1)], -1).reshape(
                GRID, M, -1
            )
        out = np.zeros((*drawn.shape, 4), a.dtype)
        for number, pair in enumerate(_PAIRS):
            for which, place in enumerate(pair):
                out[..., place] += np.where(drawn == number, a[..., which::2], 0)
        return out.reshape(GRID, M, -1)

    def metadata(self) -> np.ndarray:
        table = _HALVES if self.bits == 32 else [x | y << 2 for x, y in _PAIRS]
        codes = np.array(table, np.uint32)[self._drawn].reshape(GRID, M, self.steps, -1)
        words = np.full((GRID, self.steps, 128), _WRONG, np.uint32)
        for thread in range(128):
            found = [codes[:, row, :, groups] for row, groups in self._groups(thread)]
            if found:
                nibbles = np.concatenate(found, axis=-1)
                shifts = 4 * np.arange(nibbles.shape[-1], dtype=np.uint32)
                words[:, :, thread] = np.bitwise_or.reduce(nibbles << shifts, axis=-1)
        return words

    def _groups(self, thread: int) -> list[tuple[int, slice]]:
        """(row, its groups) that a thread brings, from the lowest bits of its register on."""
        warp, lane = divmod(thread, 32)
        row, of_four = 16 * warp + lane // 4, lane % 4
        if self.bits == 8:  # lanes 0 and 1: columns below 32 of both rows; 2 and 3: the others
            return [(row + 8 * (of_four % 2), slice(8 * (of_four // 2), 8 * (of_four // 2) + 8))]
        if of_four // 2 != self.selector:
            return []
        half = slice(4 * (of_four % 2), 4 * (of_four % 2) + 4)
        return [(row, half), (row + 8, half)]

    def metadata_operands(self, step: int) -> str:
        return f", %e{step}, {self.selector}"


def variants() -> Iterator[Sparse]:
    """Each shape of each row of types once; what else there is takes turns."""
    for types, sizes in _FORMS:
        for number, n in enumerate(sizes):
            yield _variant(types[number % len(types)], n, number)


def _variant(types: str, n: int, number: int) -> Sparse:
    turn = random_words(f"wgmma.sp {types} {n}", 8).tolist()
    wide = "16" in types.split(".")[1]
    b_mn, a_mn = wide and turn[0] % 2 == 1, wide and turn[1] % 2 == 1
    # a row of B of one operation has 64 bytes, more than the pattern of 32
    fitting = [
        name
        for name, span in SPANS.items()
        if (2 * n % span == 0 if b_mn else name != "32B")
    ]  # fmt: skip
    a = (*SPANS, "registers")[number % 5]
    integers = types.startswith(("s32", "satfinite"))
    return Sparse(
        types,
        n,
        a,
        fitting[turn[4] % len(fitting)],
        a_mn and a != "registers",
        b_mn,
        (1, 1) if integers else (1 - 2 * (turn[2] % 2), 1 - 2 * (turn[3] % 2)),
        accumulate=turn[5] % 4 != 0,
        selector=turn[6] % 2 if "16" in types.split(".")[1] or "tf32" in types else 0,
    )


# -- questions ------------------------------------------------------------------------------------


def _changed(variant: Sparse, contents: dict[str, np.ndarray]) -> Program:
    """The variant's program with other inputs."""
    made = program(variant).program
    params = [
        dataclasses.replace(param, data=contents.get(param.name, param.data))
        if isinstance(param, Buffer)
        else param
        for param in made.params
    ]
    return dataclasses.replace(made, params=params)


def with_a_nan(variant: Sparse) -> tuple[Program, int]:
    """The variant with a NaN for B's first element, and how many rows of A store one for it."""
    image = next(b for b in program(variant).program.buffers() if b.name == "image").data.copy()
    b_bytes = variant.n * variant.k * variant.steps * 2
    image.reshape(GRID, -1)[:, -b_bytes:].view(np.uint16)[:, 0] = 0x7FC0
    first = (variant.metadata()[:, 0, ::4] & 0xF, variant.metadata()[:, 0, ::4] >> 16 & 0xF)
    stored = sum(int(((code & 3 == 0) | (code >> 2 == 0)).sum()) for code in first)
    return _changed(variant, {"image": image}), stored


def without_metadata(variant: Sparse) -> Program:
    """The variant of zeros, with metadata 0b0000."""
    buffers = {b.name: b.data for b in program(variant).program.buffers()}
    return _changed(variant, {name: np.zeros_like(buffers[name]) for name in ("image", "d", "e")})


def cases() -> Iterator[Case]:
    yield from map(program, variants())
