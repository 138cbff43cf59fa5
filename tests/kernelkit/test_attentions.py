"""The two attentions share their interface: windows, softcaps, sinks, `out`, plans, wrong names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fmha
import gqa_lowlatency
from fmha import api as fmha_api
from gqa_lowlatency import api as decode_api
from lab.house.hops import as_on_a_gpu
from tests.support.attentions import BF16, problem, same

WINDOW = 9


@dataclass(frozen=True)
class Family:
    """Public functions of an attention.

    causal: value of `causal` to pass with the window pair (n, 0).
    names: names of arguments in other libraries, and the hints for them.
    """

    attend: Callable[..., Any]
    plan: Callable[..., Any]
    names: Mapping[str, str]
    causal: bool


FAMILIES = {
    "attention": Family(fmha.attention, fmha.attention_plan, fmha_api.OTHER_NAMES, causal=False),
    "decode": Family(
        gqa_lowlatency.decode, gqa_lowlatency.decode_plan, decode_api.OTHER_NAMES, causal=True
    ),
}


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


def given(**options) -> dict[str, Any]:
    """Options that use one kernel in all of these tests."""
    sinks = torch.tensor([0.5, -1.25, 2.0, 0.0])
    return {"causal": True, "window": WINDOW, "sinks": sinks, "return_lse": True} | options


def test_a_window_is_a_number_or_a_pair(family):
    inputs, _ = problem("dense")
    expected = family.attend(*inputs, **given())
    for window in ((WINDOW, None), [WINDOW, None]):
        assert same(family.attend(*inputs, **given(window=window)), expected)
    pair = given(window=(WINDOW, 0), causal=family.causal)
    assert same(family.attend(*inputs, **pair), expected)
    assert not same(family.attend(*inputs, **given(window=WINDOW - 1)), expected)


def test_no_softcap_is_none(family):
    inputs, _ = problem("dense")
    assert same(family.attend(*inputs, **given(softcap=None)), family.attend(*inputs, **given()))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float64])
def test_sinks_are_of_any_float_dtype(family, dtype):
    inputs, _ = problem("dense")
    expected = family.attend(*inputs, **given())
    sinks = given()["sinks"].to(dtype)
    assert same(family.attend(*inputs, **given(sinks=sinks)), expected)
    other = family.attend(*inputs, **given(sinks=torch.zeros(4, dtype=dtype)))
    assert not same(other, expected)


@pytest.mark.usefixtures("poisoned_outputs")
def test_results_are_written_to_out(family):
    """All of `out` and nothing else is written; `out` itself is returned."""
    inputs, _ = problem("dense")
    expected = family.attend(*inputs, **given())
    wide = torch.full((2, 3, 6, 128), 7.0, dtype=BF16)
    for out in (torch.empty(2, 3, 4, 64, dtype=BF16), wide[:, :, 1:5, :64]):
        assert family.attend(*inputs, **given(out=out, return_lse=False)) is out
        assert torch.equal(out, expected[0])
        found, lse = family.attend(*inputs, **given(out=out))
        assert found is out
        assert torch.equal(lse, expected[1])
    wide[:, :, 1:5, :64] = 7.0
    assert (wide == 7.0).all()


def test_out_says_the_dtype(family):
    inputs, _ = problem("dense")
    expected = family.attend(*inputs, **given(out_dtype=torch.float32))
    out = torch.empty(2, 3, 4, 64)
    assert family.attend(*inputs, **given(out=out))[0] is out
    assert torch.equal(out, expected[0])


def test_a_plan_serves_other_tensors(family):
    inputs, tables = problem("pages")
    options = given()
    del options["return_lse"]
    plan = family.plan(*inputs, **tables, **options)
    others = [tensor.flip(0).contiguous() for tensor in inputs]
    other_tables = {name: table.flip(0).contiguous() for name, table in tables.items()}
    for step, given_tables in ((inputs, tables), (others, other_tables), (inputs, tables)):
        expected = family.attend(*step, **given_tables, **given())
        assert same(plan(*step, **given_tables)[:2], expected)
        out, lse = torch.empty_like(step[0]), torch.empty(2, 4, 3)
        results = plan(*step, **given_tables, out=out, lse=lse)
        assert results[0] is out
        assert results[1] is lse
        assert same((out, lse), expected)
    with pytest.raises(ValueError, match="planned with q, k, v, kv_lens, page_table, out, lse"):
        plan(*inputs, page_table=tables["page_table"])


def test_repeated_calls_are_what_the_first_one_was(family):
    """Repeated calls have the same results and errors."""
    (q, k, v), tables = problem("lens")
    options = given() | tables
    expected = family.attend(q, k, v, **options)
    out, wide = torch.empty_like(q), torch.empty(3, *q.shape[1:], dtype=q.dtype)
    with as_on_a_gpu():
        for other in (q, q.flip(0).contiguous(), q) * 2:
            other = wide[:2].copy_(other)
            o, lse = family.attend(other, k, v, **options)
            assert family.attend(other, k, v, **options, out=out)[0] is out
            assert torch.equal(family.attend(other, k, v, **options | {"return_lse": False}), o)
            assert torch.equal(out, o)
            for wrong, error, words in (
                ({"causal": 1}, TypeError, "causal is 1, expected bool"),
                ({"return_lse": 1}, TypeError, "return_lse is 1, expected bool"),
                ({"window": (float(WINDOW), None)}, TypeError, "window_left is 9.0"),
                ({"out": wide[1:]}, ValueError, "out shares memory with q"),
                ({"sinks": options["sinks"].clone().requires_grad_()}, NotImplementedError, "grad"),
            ):
                with pytest.raises(error, match=words):
                    family.attend(other, k, v, **options | wrong)
        assert same((o, lse), expected)


@pytest.mark.usefixtures("no_compile")
def test_plans_know_their_options(family):
    inputs, _ = problem("dense")
    for name in ("return_lse", "out"):
        with pytest.raises(TypeError, match=f"_plan does not accept {name}: a call"):
            family.plan(*inputs, **{name: None})


@pytest.mark.usefixtures("no_compile")
@pytest.mark.parametrize("name", fmha_api.OTHER_NAMES)
def test_names_of_other_libraries_are_answered(family, name):
    """The error gives the name here, which the function has, or advice."""
    inputs, _ = problem("dense")
    hint = family.names[name]
    known = hint in inspect.signature(family.attend).parameters
    assert known or " " in hint
    for call in (family.attend, family.plan):
        with pytest.raises(TypeError) as refused:
            call(*inputs, **{name: None})
        words = f"{family.attend.__name__} has no argument {name}"
        words += f"; it is called {hint} here" if known else f": {hint}"
        assert words in str(refused.value)


def test_minus_one_is_unbounded(family):
    """-1 means unbounded in a pair, as in FlashAttention, and as FlashInfer's `window_left`."""
    inputs, options = problem("dense")
    for unbounded, minus_one in (((WINDOW, None), (WINDOW, -1)), (None, -1)):
        wanted, found = (
            family.attend(*inputs, **(options | given(causal=False, window=window, sinks=None)))
            for window in (unbounded, minus_one)
        )
        assert same(found, wanted)
    with pytest.raises(ValueError, match="window left -2"):
        family.attend(*inputs, **(options | {"window": (-2, 0)}))


@pytest.mark.usefixtures("no_compile")
def test_other_names_are_those_of_both(family):
    own = {"q_scale", "mask_mod", "score_mod", "block_mask"}  # attention has them
    assert family.names.keys() - own == fmha_api.OTHER_NAMES.keys()


@pytest.mark.usefixtures("no_compile")
def test_gradients_are_refused(family):
    q, k, v = problem("dense")[0]
    for call in (family.attend, family.plan):
        with pytest.raises(NotImplementedError, match="v requires grad"):
            call(q, k, v.clone().requires_grad_())
