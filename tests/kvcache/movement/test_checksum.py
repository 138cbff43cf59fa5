"""The checksum in the emulator, under its checker: the reference's numbers; what it notices."""

from __future__ import annotations

import random

import pytest
import torch

from kvcache.movement import api, reference
from kvcache.movement.config import SMALLEST_PIECE
from kvcache.movement.launch import ARCHS
from tests.kvcache.movement.rows_cases import check_checksum, poisoned

each_arch = pytest.mark.parametrize("arch", ARCHS)


@each_arch
def test_numbers(arch):
    found = check_checksum(3 * SMALLEST_PIECE, 16, 2 * SMALLEST_PIECE + 48, arch=arch)
    assert found[1] == 0
    assert found[3] == found[4]
    assert len(set(found.tolist())) == 4


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("begin", "end"), [(0, 16), (16, 16), (0, 70_000), (4080, 4112)])
def test_more_numbers(begin, end, arch):
    check_checksum(70_000, begin, end, arch=arch)


@pytest.mark.usefixtures("no_launches")
def test_of_nothing():
    pool = poisoned(3, 64)
    assert api.checksum(pool, torch.tensor([0, 1]), 32, 32).tolist() == [0, 0]
    assert api.checksum(pool, torch.tensor([], dtype=torch.int64), 0, 64).tolist() == []


def test_equal_bytes_wherever_they_lie():
    pool = poisoned(3, 256)
    pool[2] = pool[0]
    first, other, again = api.checksum(pool, torch.arange(3), 32, 224).tolist()
    assert first == again != other


def test_it_notices():
    """Each bit that flips, each pair of words that is swapped, zeros in place of a word."""
    pool = poisoned(1, 64)
    seen = {int(reference.checksum(pool, torch.tensor([0]), 0, 64))}
    changed = []
    for bit in range(64 * 8):
        other = pool.clone()
        other[0, bit // 8] ^= 1 << bit % 8
        changed.append(other)
    words = pool[0].clone().view(torch.int32)
    for first in range(16):
        for second in range(first):
            swapped = words.clone()
            swapped[[first, second]] = swapped[[second, first]]
            changed.append(swapped.view(torch.uint8)[None])
    for other in changed:
        seen.add(int(reference.checksum(other, torch.tensor([0]), 0, 64)))
    assert len(seen) == 1 + len(changed)


def test_both_halves_are_of_use():
    """Sums of 32 bits of many contents: as many different ones as chance has it, each by itself."""
    pick = random.Random(1)
    pool = torch.tensor([[pick.randrange(4) for _ in range(64)] for _ in range(2000)])
    found = reference.checksum(pool.to(torch.uint8), torch.arange(2000), 0, 64)
    contents = {tuple(row) for row in pool.tolist()}
    for half in (found & 0xFFFFFFFF, found >> 32):
        assert len(set(half.tolist())) >= len(contents) - 1
