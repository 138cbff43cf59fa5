"""Judge hostile calls: a call may be refused with an error that names what is wrong, or be
right.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

NAMED = (TypeError, ValueError, NotImplementedError)
REFUSALS = (*NAMED, FileNotFoundError)  # the last one for functions that read files
# Messages of Python and torch themselves, which name no argument.
BARE = re.compile(
    r"not supported between instances|unsupported operand|object is not (iterable|subscriptable)|"
    r"has no attribute|object of type|cannot be interpreted|unpack|unhashable|"
    r"expected.*but got|must be real number|invalid literal|could not convert|out of range for"
)


def hostile(call: Callable[[], object], words: str, *, name: str = "") -> Any:
    """A row of a table: a call, and a part of its message."""
    return pytest.param(call, words, id=name or re.sub(r"[^\w ,.+-]", "", words)[:50])


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose memory is freed, as sharded training leaves parameters."""
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


def sharing(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view in the same shape whose elements share bytes."""
    first, *others = tensor.stride()
    return tensor.as_strided(tensor.shape, (first // 2, *others))


def refused(call: Callable[[], object], words: str) -> Exception:
    """Return the error of a call, which has to be one of NAMED, with these words, and none of
    Python's own messages."""
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
    """Restart the random values."""
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
    """Random bytes below 0x78, so that no float read from them is huge or NaN."""
    return torch.randint(0x78, shape, dtype=torch.uint8, generator=RANDOM)


def angles(positions: int, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin tables of rotary embeddings."""
    angle = torch.rand((positions, pairs), generator=RANDOM) * 6
    return angle.cos(), angle.sin()
