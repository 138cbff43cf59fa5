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
