"""The reference itself: scales and rotations compared with published ones, changes that checksums
notice.
"""

from __future__ import annotations

import math
import random

import torch

from kvcache.movement import reference
from tests.kvcache.movement.rows_cases import poisoned

GROUPS, GROUP, NOPE = 7, 64, 448


def published_codes(amax: torch.Tensor) -> torch.Tensor:
    """The exponent byte by FlashMLA's fp32 arithmetic: s = 2^ceil(log2(max(.., 1e-4)))."""
    return (amax.float() / 448.0).clamp_min(1e-4).log2().ceil().int() + 127


def test_scales_of_all_magnitudes():
    """Every finite bf16 is the largest of a group once."""
    tops = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    entries = torch.zeros(-(-len(tops) // GROUPS) * GROUPS, GROUP, dtype=torch.bfloat16)
    entries[: len(tops), 5] = -tops
    rope = torch.zeros(len(entries) // GROUPS, 64, dtype=torch.bfloat16)
    data, scales = reference.quantised(torch.cat((entries.view(-1, NOPE), rope), 1))
    codes = scales[:, :GROUPS].flatten()[: len(tops)].int()
    assert torch.equal(codes, published_codes(tops))
    assert not scales[:, GROUPS].any()
    elements = data[:, :NOPE].view(torch.float8_e4m3fn).float().view(-1, GROUP)[: len(tops), 5]
    back = elements.double() * torch.exp2(codes.double() - 127)
    error = (back + tops.double()).abs()
    step = torch.exp2(codes.double() - 127 - 9)  # half of the smallest e4m3 number
    assert (error <= (tops.double() / 16).clamp(min=0) + step).all()
    assert elements.abs().max() <= 448


def test_a_lost_group_stays_alone():
    entries = torch.ones(3, 512, dtype=torch.bfloat16)
    entries[0, 70], entries[1, 447], entries[2, 448] = math.nan, -math.inf, math.nan
    data, scales = reference.quantised(entries)
    assert scales.tolist() == [
        [*(0xFF if group == lost else 119 for group in range(GROUPS)), 0] for lost in (1, 6, None)
    ]
    groups = data[:, :NOPE].unflatten(1, (GROUPS, GROUP))
    assert (groups[0, 1] == 0x7F).all()
    assert (groups[1, 6] == 0x7F).all()
    assert ((groups == 0x7F).all(-1) == (scales[:, :GROUPS] == 0xFF)).all()
    back = reference.dequantised(data, scales)
    assert torch.equal(back[:, :NOPE].isnan().sum(1), torch.tensor([64, 64, 0]))
    assert torch.equal(back[2, :NOPE], entries[2, :NOPE])


def test_rotation_is_of_neighbours_at_the_end():
    kv = torch.arange(1.0, 513.0).repeat(2, 1)
    angles = torch.arange(32.0).repeat(2, 1) * 0.1
    turned = reference.rotated(kv, angles.cos(), angles.sin()).float()
    exact = torch.polar(torch.ones(32), angles[0]) * torch.view_as_complex(
        kv[0, NOPE:].unflatten(0, (32, 2))
    )
    expected = torch.cat((kv[0, :NOPE], torch.view_as_real(exact).flatten()))
    torch.testing.assert_close(turned[0], expected, rtol=2**-8, atol=1e-2)
    unturned = reference.rotated(kv.bfloat16(), torch.ones(2, 32), torch.zeros(2, 32))
    assert torch.equal(unturned, kv.bfloat16())


def test_equal_bytes_wherever_they_lie():
    pool, slots = poisoned(3, 256), torch.tensor([0, 1, 2, -1])
    pool[2] = pool[0]
    first, other, again, nobody = reference.checksum(pool, slots, 32, 224).tolist()
    assert first == again != other
    assert nobody == 0


def test_it_notices():
    """Changes are each flipped bit, each pair of swapped words, and zeros in place of a word."""
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
    """Each half of the sums is as distinct as 32 random bits, for many contents."""
    pick = random.Random(1)
    pool = torch.tensor([[pick.randrange(4) for _ in range(64)] for _ in range(2000)])
    found = reference.checksum(pool.to(torch.uint8), torch.arange(2000), 0, 64)
    contents = {tuple(row) for row in pool.tolist()}
    for half in (found & 0xFFFFFFFF, found >> 32):
        assert len(set(half.tolist())) >= len(contents) - 1
