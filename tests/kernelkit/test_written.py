"""Arguments that operators write: they overlap no other argument, and can be written."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch

from kernelkit.call.operator import Operator, Schema
from kernelkit.call.tensors import require_writable


@dataclass(frozen=True)
class Moved:
    """Arguments of an operator that writes the first two tensors."""

    one: torch.Tensor
    two: torch.Tensor
    read: torch.Tensor
    factor: float = 1.0
    count: int = 0


RAN: list[Moved] = []
MOVED = Operator(
    "kernelkit_tests_moved", Moved, lambda given: RAN.append(given) or (), lambda _: (),
    results=0, writes=("one", "two"),
)  # fmt: skip


def refusal(*tensors: torch.Tensor) -> str:
    """Return the operator's error, '' if it ran."""
    RAN.clear()
    try:
        MOVED(dict(zip(("one", "two", "read"), tensors, strict=True)))
    except ValueError as error:
        assert not RAN
        return str(error)
    assert RAN
    return ""


WHOLE, APART = torch.zeros(8, 8), torch.zeros(8, 8)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ((WHOLE, WHOLE, APART), "one shares memory with two"),
        ((WHOLE[:5], WHOLE[4:], APART), "one shares memory with two"),
        ((torch.from_numpy(WHOLE.numpy()), WHOLE, APART), "one shares memory with two"),
        ((WHOLE, APART, WHOLE), "one shares memory with read"),
        ((APART, WHOLE, WHOLE.view(torch.int32)[7, 7:]), "two shares memory with read"),
        ((WHOLE.expand(2, 8, 8), APART, APART[:0]), "one .* elements that share memory"),
        ((WHOLE[:4], WHOLE[4:], APART), "^$"),
        ((WHOLE[:, ::2], WHOLE[:, 1::2], APART), "^$"),
        ((WHOLE[::2], WHOLE[1::2], APART), "^$"),
        ((WHOLE[:4, :4], WHOLE[:4, 4:], WHOLE[4:]), "^$"),
    ],
)
def test_what_is_written_overlaps_no_other_argument(tensors, words):
    assert re.search(words, refusal(*tensors)), refusal(*tensors)


@pytest.mark.parametrize("dim", range(4))
def test_keys_and_values_of_one_pool_are_apart_in_every_layout(dim):
    """Engines interleave K and V by layer, page, row, head or column; deciding takes no time."""
    sizes = [7001, 16, 8, 128]
    memory = torch.empty((*sizes[:dim], 2, *sizes[dim:]), dtype=torch.uint8)  # untouched
    k, v = memory.unbind(dim)
    start = time.perf_counter()
    assert not refusal(k, v, APART)
    assert time.perf_counter() - start < 1
    shifted = memory.flatten()[1 : 1 + k.numel()].view(k.shape)
    assert "shares memory" in refusal(k, shifted, APART)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("mode", ["r", "c", "r+"])
def test_memory_that_is_mapped_read_only_is_refused(mode, tmp_path):
    path = tmp_path / "mapped"
    np.zeros((4, 1024), np.float32).tofile(path)
    mapped = torch.from_numpy(np.memmap(path, np.float32, mode, shape=(4, 1024)))
    words = "one is in memory that is mapped read-only" if mode == "r" else "^$"
    assert re.search(words, refusal(mapped, APART, APART[:0]))
    assert re.search(words, refusal(mapped[3, 1020:], APART, APART[:0]))
    assert not refusal(WHOLE, APART, mapped), "what is read may be read-only"


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_memory_of_numpy_and_of_other_processes_can_be_written():
    flagged = np.zeros(4)
    flagged.flags.writeable = False  # a flag of numpy's, which torch does not keep
    tensor = torch.from_numpy(flagged)
    require_writable(a=tensor, b=torch.zeros(3).share_memory_(), c=torch.zeros(3, device="meta"))


@pytest.mark.parametrize(
    ("factor", "count"), [(np.float32(0.5), np.int64(3)), (Fraction(1, 2), np.uint8(3)), (0.5, 3)]
)
def test_numbers_of_any_library_are_numbers(factor, count):
    schema = Schema(Moved)
    flat = schema.flat({"factor": factor, "count": count})
    assert flat == {"factor": 0.5, "count": 3}
    assert [*map(type, flat.values())] == [float, int]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("factor", np.bool_(True), "factor is np.True_"),
        ("factor", np.ones(1), r"factor is array\(\[1.\]\), expected float"),
        ("factor", 1j, "factor is 1j, expected float"),
        ("factor", Fraction(10**400), "factor is an int of 1329 bits"),
        ("count", np.float32(3), r"count is np.float32\(3.0\), expected int"),
        ("count", Fraction(3), r"count is Fraction\(3, 1\), expected int"),
        ("count", np.bool_(False), "count is np.False_"),
    ],
)
def test_what_is_no_number_is_named(name, value, words):
    with pytest.raises((TypeError, ValueError), match=words):
        Schema(Moved).flat({name: value})
