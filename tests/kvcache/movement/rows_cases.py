"""Pools, entries and mappings that are hostile by default, and comparisons of a kernel's result
with the reference, byte for byte, over the whole pool.

A pool lies in poison: slots are wider than their addressed part and apart from each other, and
bytes that must not be written are compared, too. Tokens lie in a wider tensor of NaN.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from kernelkit.call.launch import emulation
from kvcache.layouts.latent import LATENTS, ROPE
from kvcache.layouts.records import BF16_512, FP8_584, FP8_656, Record, round_up
from kvcache.layouts.rows import NO_ENTRY, Rows
from kvcache.movement import api, reference
from ptxemu import Options
from ptxemu.check.text import render

CHECKED = Options(check=True, limit=600.0)
BESIDE = 48  # bytes of poison on either side: a multiple of 16, and of no record's size
GROUP = 64  # elements of a kind
ANGLES = 37  # positions in the tables
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
KINDS = 13
EQUAL = 3  # one in EQUAL tokens has equal neighbours among its RoPE elements


@contextmanager
def checked(accumulation: str = "fast"):
    """Run emulated launches under the checker, which must report nothing; no effect on a GPU."""
    with emulation(replace(CHECKED, accumulation=accumulation)) as active:
        yield
    for report in active.reports:
        assert not report.findings, render(report)


def poisoned(slots: int, slot_bytes: int, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """A pool of random bytes whose slots are not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    size = (slots, slot_bytes + 2 * BESIDE)
    wide = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    return wide.to(device)[:, BESIDE : BESIDE + slot_bytes]


def around(pool: torch.Tensor) -> torch.Tensor:
    """All bytes of a poisoned pool, including those between its slots."""
    begin, width = pool.storage_offset() - BESIDE, pool.shape[1] + 2 * BESIDE
    return pool.as_strided((len(pool), width), (pool.stride(0), 1), begin)


def like(pool: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, including the bytes between slots."""
    return around(pool).cpu().clone()[:, BESIDE : BESIDE + pool.shape[1]]


def assert_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare byte for byte."""
    mine, theirs = (x.cpu().contiguous().flatten().view(torch.uint8) for x in (got, expected))
    differ = (mine != theirs).nonzero()
    assert not len(differ), f"{len(differ)} bytes differ, the first at {differ[0].tolist()}"


@dataclass(frozen=True)
class Movement:
    """A movement of tokens to or from `slots` slots of `rows` entries, between paddings of `gap`
    bytes.

    holes: one in `holes` tokens has -1.
    packed: token strides are as small as possible.
    """

    record: Record
    tokens: int
    slots: int = 5
    rows: int = 7
    gap: int = 80
    holes: int = 4
    dtype: str = "bf16"
    seed: int = 0

    def __str__(self) -> str:
        places = f"{self.slots}x{self.rows}-{self.gap}-{self.dtype}-{self.seed}"
        return f"{type(self).__name__.lower()}-{self.record.name}-{self.tokens}-{places}"

    def build_rows(self, device: str = "cpu") -> Rows:
        data, scales = self.rows * self.record.data_bytes, self.rows * self.record.scale_bytes
        begin = self.gap + round_up(data, 16) + self.gap
        slot_bytes = round_up(begin + scales + self.gap, 16)
        pool = poisoned(self.slots, slot_bytes, device, self.seed)
        return Rows(pool, self.gap, begin if scales else 0, self.rows, self.record)

    def mapping(self, device: str = "cpu", *, repeats: bool = False) -> torch.Tensor:
        """An entry for every token, with holes; entries repeat only with `repeats`, for reading."""
        pick = random.Random(str(self))
        entries = self.slots * self.rows
        if repeats:
            numbers = [pick.randrange(entries) for _ in range(self.tokens)]
        else:
            numbers = pick.sample(range(entries), min(self.tokens, entries))
        numbers += [NO_ENTRY] * (self.tokens - len(numbers))
        if self.holes:
            numbers = [NO_ENTRY if pick.randrange(self.holes) == 0 else n for n in numbers]
        pick.shuffle(numbers)
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    def latents(self, device: str = "cpu") -> torch.Tensor:
        """kv [T, elements] in a wider tensor of NaN."""
        dtype, beside, elements = DTYPES[self.dtype], 24, LATENTS[self.record.name].elements
        wide = torch.full((self.tokens, elements + 2 * beside), math.nan, dtype=dtype)
        wide[:, beside : beside + elements] = latents(self.tokens, self.seed, dtype, elements)
        return wide.to(device)[:, beside : beside + elements]

    def rope(self, device: str = "cpu") -> tuple[torch.Tensor, ...]:
        """(positions of the tokens, cosines, sines); the tables share rows."""
        generator = torch.Generator().manual_seed(self.seed)
        positions = torch.randint(0, ANGLES, (self.tokens,), generator=generator)
        inverse = 10000.0 ** (-torch.arange(0, ROPE, 2) / ROPE)
        angles = torch.arange(ANGLES)[:, None] * inverse
        angles[:2] = math.pi / 4 * torch.tensor([[1.0], [-1.0]])
        # A rotation of equal neighbours there leaves 0, or the rounding error of a fused product.
        positions[::EQUAL] = torch.arange(len(positions[::EQUAL])) % 2
        table = torch.cat((angles.cos(), angles.sin()), 1).to(device)
        return positions.to(device), table[:, : ROPE // 2], table[:, ROPE // 2 :]


def latents(tokens: int, seed: int, dtype: torch.dtype, elements: int = 512) -> torch.Tensor:
    """Random rows [T, elements] with groups of many kinds, including the RoPE elements."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randn(tokens, elements // GROUP, GROUP, generator=generator)
    kinds = torch.randint(KINDS, groups.shape[:2], generator=generator)
    steps = torch.randint(-40, 40, groups.shape, generator=generator)
    info = torch.finfo(torch.bfloat16)
    groups[kinds == 1] *= torch.exp2(steps[kinds == 1].float())
    groups[kinds == 2] *= torch.exp2(3.0 * steps[kinds == 2, :1].float())
    groups[kinds == 3] = torch.tensor([0.0, -0.0]).repeat(GROUP // 2)
    groups[kinds == 4] *= info.smallest_normal * 4
    groups[kinds == 5] = steps[kinds == 5] * info.tiny * info.eps
    groups[kinds == 6] = steps[kinds == 6] * (info.max / 40)
    groups[kinds == 7, 5] = math.inf
    groups[kinds == 8, GROUP - 1] = math.nan
    groups[kinds == 9, 0] = -math.inf
    # Values around the limits of a power-of-two scale, and ties that round to even.
    scale = torch.exp2(steps[..., :1] / 4.0 // 1)
    edges = torch.tensor([448.0, 446.0, 450.0, -448.0, 17.0, 19.0, 0.0078125, 0.005859375])
    exact = edges.repeat(GROUP // len(edges)) * scale
    groups[kinds == 10] = exact[kinds == 10]
    groups[kinds == 11] = (exact / 450 * 448)[kinds == 11]
    groups[kinds == 12] *= 1e-4 * 448
    equal = torch.randn(len(groups[::EQUAL]), GROUP // 2, generator=generator)
    groups[::EQUAL, -1] = equal.repeat_interleave(2, 1)
    return groups.flatten(1).to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)


class Append(Movement):
    """A call of `append_swa`."""

    def check(self, device: str = "cpu", **place: str) -> None:
        """Compare every byte of the pool with the reference."""
        rows, slots, kv = self.build_rows(device), self.mapping(device), self.latents(device)
        positions, cos, sin = self.rope(device)
        expected = like(rows.pool)
        # A hole's position may be anything.
        positions = torch.where(slots < 0, 1 << 40, positions)
        with checked():
            api.append_swa(rows, kv, positions, slots, cos, sin, **place)
        tables = (x.cpu() for x in (kv, positions, slots, cos, sin))
        reference.append_swa(replace(rows, pool=expected), *tables)
        assert_equal(around(rows.pool), around(expected))


class Gather(Movement):
    """A call of `gather` for any bytes: every code of e4m3 and of a scale, including NaN."""

    def check(self, device: str = "cpu", **place: str) -> None:
        """Compare every byte of the result, and of its surroundings, with the reference."""
        rows, indices = self.build_rows(device), self.mapping(device, repeats=True)
        if self.record.scale_bytes:
            rows.scales()[..., 0] = 0  # the smallest code
        latent = LATENTS.get(self.record.name)
        whole = latent.elements if latent else self.record.data_bytes // 2
        wide = torch.full((self.tokens, whole + 48), math.nan, dtype=torch.bfloat16, device=device)
        out = wide[:, 24 : 24 + whole]
        expected_wide = wide.cpu().clone()
        with checked():
            api.gather(rows, indices, out, **place)
        found = torch.empty(self.tokens, whole, dtype=torch.bfloat16)
        reference.gather(replace(rows, pool=like(rows.pool)), indices.cpu(), found)
        expected_wide[:, 24 : 24 + whole] = found
        assert_equal(wide, expected_wide)


LATENT_RECORDS = (BF16_512, FP8_584, FP8_656)
MORE_SIZES = ((1, 1, 1, 16, 0), (33, 3, 11, 16, 2), (64, 2, 128, 96, 9), (300, 40, 9, 16, 3))


def more_cases(kind: type[Movement], record: Record, dtype: str = "bf16") -> list[Movement]:
    """Cases with one token and many, pools of one slot and of many, with and without holes."""
    return [kind(record, *sizes, dtype=dtype, seed=seed) for seed, sizes in enumerate(MORE_SIZES)]


def any_case(kind: type[Movement], records: Sequence[Record]) -> st.SearchStrategy[Movement]:
    """A strategy for any case of this kind and these records."""
    return st.builds(
        kind,
        record=st.sampled_from(records),
        tokens=st.integers(0, 40),
        slots=st.integers(1, 9),
        rows=st.integers(1, 65),
        gap=st.integers(0, 5).map(lambda n: 16 * n),
        holes=st.integers(0, 3),
        dtype=st.sampled_from([*DTYPES]),
        seed=st.integers(0, 1 << 20),
    )


# -- plain rows, slots ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Plain:
    """A call of `append_rows` for tokens [T, *shape] of K and, optionally, of V.

    apart: elements between tokens.
    """

    tokens: int
    k: tuple[int, ...]
    v: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16
    apart: int = 24
    gap: int = 80

    def __str__(self) -> str:
        sizes = "+".join("x".join(map(str, shape)) for shape in (self.k, self.v) if shape)
        dtype = str(self.dtype).removeprefix("torch.")
        return f"plain-{self.tokens}-{sizes}-{dtype}-{self.apart}-{self.gap}"

    def tensors(self, device: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.tokens)
        found = []
        for shape in filter(None, (self.k, self.v)):
            elements = math.prod(shape)
            size = (self.tokens, (elements + self.apart) * self.dtype.itemsize)
            wide = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
            tokens = wide.to(device).view(self.dtype)[:, :elements]
            found.append(tokens.unflatten(1, shape))
        return found

    def check(self, device: str = "cpu", **place: str) -> None:
        """Compare every byte of a pool with K followed by V, or K alone."""
        places, rows, begin = [], 7, self.gap
        for shape in filter(None, (self.k, self.v)):
            record = Record("plain", math.prod(shape) * self.dtype.itemsize)
            places.append((begin, record))
            begin += rows * record.data_bytes + self.gap
        pool = poisoned(5, round_up(begin, 16), device)
        pairs = [
            (Rows(pool, offset, 0, rows, record), x)
            for (offset, record), x in zip(places, self.tensors(device), strict=True)
        ]
        slots = Movement(places[0][1], self.tokens).mapping(device)
        expected = like(pool)
        with checked():
            api.append_rows(pairs[0], pairs[1] if self.v else None, slots, **place)
        moved = [(replace(mine, pool=expected), x.cpu()) for mine, x in pairs]
        reference.append_rows(moved, slots.cpu())
        assert_equal(around(pool), around(expected))


@dataclass(frozen=True)
class Slots:
    """A call of `copy_slots` between two pools of these sizes, or within one; segments as in the
    call."""

    source_bytes: int
    target_bytes: int = 0
    pairs: tuple[tuple[int, int], ...] = ((0, 3), (-1, 2), (1, 4), (2, -1))
    segments: tuple[tuple[int, int, int], ...] | None = None
    slots: int = 5
    cut: int = 0

    def __str__(self) -> str:
        parts = f"-{len(self.segments)}-{self.cut}" if self.segments is not None else ""
        return f"slots-{self.source_bytes}-{self.target_bytes}-{len(self.pairs)}{parts}"

    def check(self, device: str = "cpu", **place: str) -> None:
        """Compare every byte of both pools."""
        source = poisoned(self.slots, self.source_bytes, device)
        target = source
        if self.target_bytes:
            target = poisoned(self.slots, self.target_bytes, device, seed=1)
        segments = whole = None
        if self.segments is not None:
            segments = api.cut_segments(self.segments, self.cut or 1 << 20).to(device)
            whole = torch.tensor(self.segments, dtype=torch.int64).reshape(-1, 3)
        expected = like(target)
        before = expected if target is source else like(source)
        pairs = torch.tensor(self.pairs, dtype=torch.int64).reshape(-1, 2)
        with checked():
            api.copy_slots(source, target, pairs.to(device), segments, **place)
        reference.copy_slots(before, expected, pairs, whole)
        assert_equal(around(target), around(expected))
        if target is not source:
            assert_equal(around(source), around(before))


@dataclass(frozen=True)
class Sums:
    """A call of `checksum` for a range of some of four slots."""

    slot_bytes: int
    begin: int
    end: int
    slots: tuple[int, ...] = (2, -1, 0, 3, 3)

    def __str__(self) -> str:
        return f"sums-{self.slot_bytes}-{self.begin}-{self.end}-{len(self.slots)}"

    def check(self, device: str = "cpu", **place: str) -> None:
        """Compare the numbers."""
        pool = poisoned(4, self.slot_bytes, device)
        slots = torch.tensor(self.slots, dtype=torch.int64, device=device)
        with checked():
            found = api.checksum(pool, slots, self.begin, self.end, **place)
        expected = reference.checksum(pool.cpu(), slots.cpu(), self.begin, self.end)
        assert found.tolist() == expected.tolist()
