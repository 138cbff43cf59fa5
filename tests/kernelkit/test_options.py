"""Options declared in a TypedDict: their help texts, defaults, and wrong names."""

from __future__ import annotations

import inspect
import pydoc
import typing
from typing import Annotated, Any, TypedDict

import pytest
import torch

import fmha
import gqa_lowlatency
import moe
from kernelkit.call.front import defaults_of, given_options, spelled

FUNCTIONS = [
    fmha.attention, fmha.attention_plan, fmha.merge, fmha.warmup, gqa_lowlatency.decode,
    gqa_lowlatency.decode_plan, gqa_lowlatency.warmup, moe.grouped_gemm, moe.grouped_gemm_plan,
    moe.grouped_gemm_swiglu, moe.fused_moe, moe.fused_moe_plan, moe.warmup,
]  # fmt: skip


class Options(TypedDict, total=False):
    size: Annotated[int, 3]
    bias: Annotated[torch.Tensor | None, None]


@spelled(Options)
def scaled(x: torch.Tensor, *, flag: bool = True, **options: Any) -> tuple[bool, dict]:
    return flag, options


def test_options_are_shown_as_arguments():
    shown = "(x: 'torch.Tensor', *, flag: 'bool' = True, size: int = 3, bias: torch.Tensor | None"
    assert str(inspect.signature(scaled)) == f"{shown} = None) -> 'tuple[bool, dict]'"
    assert typing.get_type_hints(scaled) == {
        "x": torch.Tensor, "flag": bool, "size": int, "bias": torch.Tensor | None,
        "return": tuple[bool, dict],
    }  # fmt: skip
    assert scaled(torch.ones(1), flag=False, size=4) == (False, {"size": 4})


NAMES = [f"{each.__module__}.{each.__name__}" for each in FUNCTIONS]


@pytest.mark.parametrize("function", FUNCTIONS, ids=NAMES)
def test_public_functions_show_their_options(function):
    parameters = inspect.signature(function).parameters
    assert not [each for each in parameters.values() if each.kind is each.VAR_KEYWORD]
    assert "arch: str | None = None" in pydoc.render_doc(function)
    hints = typing.get_type_hints(inspect.unwrap(function))
    assert hints.keys() - {"return"} == parameters.keys()
    assert hints["arch"] == str | None


def test_options_at_their_default_are_left_out():
    defaults = defaults_of(scaled)
    assert defaults == {"flag": True, "size": 3, "bias": None}
    assert given_options(scaled, {"size": 3, "flag": False}, defaults) == {"flag": False}


def test_a_wrong_option_is_named():
    with pytest.raises(TypeError, match=r"scaled has no argument sizes; did you mean size\?"):
        given_options(scaled, {"sizes": 3}, defaults_of(scaled))
    o, lse = torch.zeros(1, 2, 3, 64), torch.zeros(1, 3, 2)
    with pytest.raises(TypeError, match=r"merge has no argument sink; did you mean sinks\?"):
        fmha.merge([(o, lse)], sink=None)
    with pytest.raises(TypeError, match="attention has no argument tile_m"):
        fmha.attention(o, o, o, tile_m=64)
