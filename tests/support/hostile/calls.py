"""What a hostile call may do: be refused with an error that names what is wrong, or be right."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

NAMED = (TypeError, ValueError, NotImplementedError)
REFUSALS = (*NAMED, FileNotFoundError)  # the last one of functions that read files
# What Python and torch say of themselves, which names no argument.
BARE = re.compile(
    r"not supported between instances|unsupported operand|object is not (iterable|subscriptable)|"
    r"has no attribute|object of type|cannot be interpreted|unpack|unhashable|"
    r"expected.*but got|must be real number|invalid literal|could not convert|out of range for"
)


def hostile(call: Callable[[], object], words: str, *, name: str = "") -> Any:
    """A row of a table: a call, and words of its message."""
    return pytest.param(call, words, id=name or re.sub(r"[^\w ,.+-]", "", words)[:50])


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """One like it whose memory is gone, as sharded training leaves parameters."""
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


def sharing(tensor: torch.Tensor) -> torch.Tensor:
    """A view of its memory in the same shape, whose elements share bytes."""
    first, *others = tensor.stride()
    return tensor.as_strided(tensor.shape, (first // 2, *others))


def refused(call: Callable[[], object], words: str) -> Exception:
    """The error of a call: one of NAMED, with these words, and none of Python's own."""
    with pytest.raises(NAMED) as caught:
        call()
    error = caught.value
    text = str(error)
    assert re.search(words, text), f"{type(error).__name__}: {text}"
    assert not BARE.search(text), f"{type(error).__name__}: {text}"
    return error


# ---- values

SEED = 60
RANDOM = torch.Generator().manual_seed(SEED)


def begin_again() -> None:
    """The next values are those of the first call again."""
    RANDOM.manual_seed(SEED)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normally distributed values."""
    return torch.randn(shape, generator=RANDOM).to(dtype)


def bf16(*shape: int) -> torch.Tensor:
    """Normally distributed values in bfloat16."""
    return normal(*shape, dtype=torch.bfloat16)


def positive(*shape: int) -> torch.Tensor:
    """Values in fp32 from 0.5 to 1.5, such as scales."""
    return torch.rand(shape, generator=RANDOM) + 0.5


def some_bytes(*shape: int) -> torch.Tensor:
    """Bytes of any value below 0x78, so that no float that they are read as is huge or NaN."""
    return torch.randint(0x78, shape, dtype=torch.uint8, generator=RANDOM)


def angles(positions: int, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin tables of rotary embeddings."""
    angle = torch.rand((positions, pairs), generator=RANDOM) * 6
    return angle.cos(), angle.sin()
