"""Schemas of operators from dataclasses: the text, flattening and rebuilding, what is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch.autograd import forward_ad

from kernelkit.call.operator import Schema


@dataclass(frozen=True)
class Blocks:
    """A tensor with one number per block of another tensor."""

    each: torch.Tensor
    size: int = 16


@dataclass(frozen=True)
class Packed:
    """Elements, and the scales to decode them."""

    data: torch.Tensor
    blocks: Blocks | None = None
    whole: torch.Tensor | str | None = None


@dataclass(frozen=True)
class Arguments:
    """Arguments with every kind of field."""

    x: torch.Tensor
    w: Packed
    parts: tuple[torch.Tensor, ...]
    maxima: tuple[torch.Tensor | None, ...]
    h: Packed | None = None
    scale: torch.Tensor | str | None = None
    amax: torch.Tensor | None = None
    out: torch.Tensor | None = None
    causal: bool = False
    keys: int | None = None
    factor: float = 1.0
    kind: str = "plain"
    dtype: torch.dtype | None = None


SCHEMA = Schema(Arguments)
X, Y, Z = torch.zeros(3, 2)
PLAIN = Arguments(X, Packed(Y), (X, Z), (None, Y))
GIVEN = {
    "nothing else": PLAIN,
    "every tensor": Arguments(
        X, Packed(Y, Blocks(Z, 32), X), (X,), (Y,), Packed(Z, Blocks(Y), Y), Z, Y, X
    ),
    "words": replace(PLAIN, scale="mean", h=Packed(X, whole="max"), kind="other"),
    "numbers": replace(PLAIN, causal=True, keys=7, factor=2.0, dtype=torch.float16),
    "numbers that are false": replace(PLAIN, keys=0, factor=0.0),
    "a whole number": replace(PLAIN, factor=3),
}


def test_the_text():
    assert SCHEMA.text(2, ("amax", "h_blocks_each"), without="out") == (
        "(Tensor x, Tensor w_data, Tensor[] parts, Tensor?[] maxima, Tensor? w_blocks_each=None, "
        "Tensor? w_whole=None, Tensor? h_data=None, Tensor(b!)? h_blocks_each=None, "
        "Tensor? h_whole=None, Tensor? scale=None, Tensor(a!)? amax=None, *, "
        "SymInt w_blocks_size=16, str? w_whole_word=None, SymInt h_blocks_size=16, "
        "str? h_whole_word=None, str? scale_word=None, bool causal=False, SymInt? keys=None, "
        'float factor=1.0, str kind="plain", ScalarType? dtype=None) -> (Tensor, Tensor)'
    )
    assert SCHEMA.text(0).endswith("-> ()")
    torch.library.define("kernelkit_tests::every_kind", SCHEMA.text(1))  # torch reads it, too


@pytest.mark.parametrize("name", GIVEN)
def test_there_and_back(name):
    """Leaves are named; those with their default are left out."""
    given = GIVEN[name]
    flat = SCHEMA.flat(vars(given))
    assert SCHEMA.build(flat) == given
    assert SCHEMA.build(SCHEMA.flat(vars(PLAIN)) | flat) == given
    assert set(SCHEMA.flat(vars(PLAIN))) == {"x", "w_data", "parts", "maxima"}


def test_what_must_be_there():
    with pytest.raises(TypeError, match="w_data is missing"):
        SCHEMA.build({"x": X, "parts": (), "maxima": ()})


TYPES = {
    "x is list, expected torch.Tensor": {"x": [1.0]},
    "x is NoneType, expected torch.Tensor": {"x": None},
    "amax is float, expected torch.Tensor": {"amax": 1.0},
    "w is Tensor, expected Packed": {"w": X},
    "w is NoneType, expected Packed": {"w": None},
    "h is Tensor, expected Packed or None": {"h": X},
    "w.data is str, expected torch.Tensor": {"w": Packed("data")},
    "w.blocks.size is 0.5, expected int": {"w": Packed(X, Blocks(X, 0.5))},
    "scale is float, expected torch.Tensor": {"scale": 1.0},
    "parts is NoneType, expected torch.Tensor": {"parts": (X, None)},
    "maxima is str, expected torch.Tensor": {"maxima": (None, "max")},
    "causal is 1, expected bool": {"causal": 1},
    "keys is True, expected int | None": {"keys": True},
    "keys is 2.0, expected int | None": {"keys": 2.0},
    "factor is 'a', expected float": {"factor": "a"},
    "factor is None, expected float": {"factor": None},
    "kind is 3, expected str": {"kind": 3},
    "dtype is 'half', expected torch.dtype | None": {"dtype": "half"},
    "Arguments has no argument lengths": {"lengths": 3},
}


@pytest.mark.parametrize("words", TYPES)
def test_values_of_other_types_are_refused_by_name(words):
    with pytest.raises(TypeError) as refused:
        SCHEMA.flat(vars(PLAIN) | TYPES[words])
    assert words in str(refused.value)


PLACES = ("x", "h.blocks.each", "parts[1]")


def with_one(tensor: torch.Tensor, path: str) -> dict:
    """Return arguments with `tensor` at `path`; all other tensors are plain."""
    given = {"x": tensor, "h.blocks.each": Packed(X, Blocks(tensor)), "parts[1]": (X, tensor)}
    return vars(PLAIN) | {path.partition(".")[0].removesuffix("[1]"): given[path]}


@pytest.mark.parametrize("path", PLACES)
def test_tangents_are_refused_by_name(path):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.zeros(1), torch.ones(1))
        with pytest.raises(NotImplementedError) as refused:
            SCHEMA.flat(with_one(dual, path))
        SCHEMA.flat(vars(PLAIN))
    assert f"{path} has a tangent" in str(refused.value)


@pytest.mark.parametrize("path", PLACES)
def test_gradients_are_refused_by_name(path):
    changed = with_one(torch.zeros(1, requires_grad=True), path)
    with pytest.raises(NotImplementedError) as refused:
        SCHEMA.flat(changed)
    assert f"{path} requires grad" in str(refused.value)
    with torch.no_grad():
        SCHEMA.flat(changed)
