"""Functions of positions become programs, and what cannot be traced is refused with its line."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, or_masks

from fmha import AttentionConfig, attention, trace_mask_mod, trace_score_mod
from fmha.mods import Instruction, parsed


def causal_mask(b, h, q, k):
    return q >= k


IDS, SLOPES = torch.arange(12).view(2, 6), torch.ones(4)


def test_a_program_has_each_operation_once():
    mod = trace_mask_mod(lambda b, h, q, k: (IDS[b, q] == IDS[b, k]) & (k <= q) & (k <= q))
    assert mod.program == "i64.2|load0 b q;load0 b k;eq %0 %1;le k q;and %2 %3;and %4 %3|%5"
    assert mod.tables[0] is IDS
    found = parsed(mod.program)
    assert found.tables == (("i64", 2),)
    assert found.instructions[2] == Instruction("eq", ("%0", "%1"))
    assert found.result == "%5"


def test_functions_that_compute_the_same_share_a_kernel():
    def window(size):
        return trace_mask_mod(lambda b, h, q, k: q - k <= size)

    other = trace_mask_mod(lambda batch, head, row, column: row - column <= 30)
    assert window(30).program == other.program
    assert window(30).program != window(31).program
    one, two = (AttentionConfig(mask_mod=window(size).program) for size in (30, 30))
    assert one == two


def test_functions_of_flexattention_are_accepted():
    near = functools.partial(lambda b, h, q, k, size: q - k < size, size=9)
    both = trace_mask_mod(and_masks(causal_mask, near))
    assert both.program == "|ge q k;sub q k;lt %1 9;and %0 %2|%3"
    either = trace_mask_mod(or_masks(causal_mask, lambda b, h, q, k: k < 4))
    assert either.program == "|ge q k;lt k 4;or %0 %1|%2"
    alibi = trace_score_mod(
        lambda score, b, h, q, k: score - torch.exp2(-((h + 1) * 8.0 / 4)) * (q - k)
    )
    assert "exp2" in alibi.program


def test_numbers_are_constants_and_tensors_are_tables():
    scale = torch.tensor(0.5)
    mod = trace_score_mod(lambda s, b, h, q, k: s * scale + SLOPES[h] * 2 + SLOPES[0].item())
    assert [table.ndim for table in mod.tables] == [0, 1]
    assert mod.tables[0] is scale
    assert "0x1.0000000000000p+0" in mod.program


def with_if(b, h, q, k):
    if q > k:
        return k > 3
    return k < 3


WRONG = {
    "a branch": (with_if, NotImplementedError, "`if q > k:`.*torch.where"),
    "and": (lambda b, h, q, k: (q > k) and (k > 3), NotImplementedError, "use.*torch.where"),
    "an int": (lambda b, h, q, k: q + k, NotImplementedError, "returns int, expected bool"),
    "nothing": (lambda b, h, q, k: None, NotImplementedError, "returns None"),
    "a tensor": (lambda b, h, q, k: q < IDS, NotImplementedError, r"shape \(2, 6\)"),
    "a row": (lambda b, h, q, k: IDS[b] > q, NotImplementedError, "1 indices too few"),
    "a slice": (lambda b, h, q, k: IDS[b, :] > q, NotImplementedError, "slices"),
    "too many indices": (lambda b, h, q, k: IDS[b, q, k] > q, NotImplementedError, "3 indices"),
    "a float64": (
        lambda b, h, q, k: SLOPES.double()[h] > 0, NotImplementedError, "torch.float64: one of",
    ),
    "cumsum": (lambda b, h, q, k: torch.cumsum(q, 0) > k, NotImplementedError, "torch.cumsum"),
    "a method": (lambda b, h, q, k: q.argmax() > k, NotImplementedError, ".argmax"),
    "a list": (lambda b, h, q, k: [1, 2][q] > k, NotImplementedError, "index of what is no tensor"),
    "float()": (lambda b, h, q, k: float(q) > k, NotImplementedError, "use those of torch"),
    "a divisor": (lambda b, h, q, k: q // 0 > k, NotImplementedError, "divisor of 0"),
    "int64": (lambda b, h, q, k: q > 1 << 40, NotImplementedError, "within int32"),
    "an empty table": (
        lambda b, h, q, k: torch.zeros(0)[k] > 0, NotImplementedError, "tensor that has none",
    ),
    "an error of its own": (lambda b, h, q, k: k < 1 / 0, NotImplementedError, "division by zero"),
    "three arguments": (lambda b, h, q: q > 0, TypeError, r"takes \(b, h, q, k\)"),
    "no function": (3, TypeError, "mask_mod is int, expected a function"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_traced_is_refused(what):
    function, kind, words = WRONG[what]
    with pytest.raises(kind, match=words) as error:
        trace_mask_mod(function)
    if kind is NotImplementedError:
        assert "test_mods.py:" in str(error.value)


def test_the_line_is_that_of_the_function():
    line = with_if.__code__.co_firstlineno + 1
    with pytest.raises(NotImplementedError, match=f"test_mods.py:{line}"):
        trace_mask_mod(with_if)


def test_limits_of_a_program():
    def long(b, h, q, k):
        for number in range(200):
            q = q * 3 + number
        return q > k

    def wide(b, h, q, k):
        return sum(torch.zeros(3)[k] for _ in range(9)) > 0

    with pytest.raises(NotImplementedError, match="more than 256 operations"):
        trace_mask_mod(long)
    with pytest.raises(NotImplementedError, match="more than 8 tensors"):
        trace_mask_mod(wide)
    with pytest.raises(ValueError, match="not a program"):
        parsed("ge q k")


def test_combinations_that_are_refused():
    q, k = torch.zeros(1, 8, 2, 64).bfloat16(), torch.zeros(1, 90, 1, 64).bfloat16()
    with pytest.raises(NotImplementedError, match="softcap with score_mod"):
        attention(q, k, k, softcap=3.0, score_mod=lambda s, b, h, q, k: s)
    with pytest.raises(TypeError, match="alibi_slopes: write it as score_mod"):
        attention(q, k, k, alibi_slopes=SLOPES)
    compiled = torch.compile(
        lambda q, k: attention(q, k, k, mask_mod=causal_mask), backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match="exception"):
        compiled(q, k)
