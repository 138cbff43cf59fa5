"""The kernels of moe whose mutants are judged, each with a problem that uses all its edges: more
steps than a ring has stages, more tiles than accumulators, experts without rows."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from lab.mutation.subject import Results, Subject
from lab.problems import mixed_gemm
from lab.problems.grouped_gemm import Case
from moe.api import grouped_gemm
from moe.arguments import Router, RouterLinear
from moe.formats import Quantized
from moe.mixed.launch import write_rows
from moe.quantiser.api import quantise
from moe.routing import combine, permutation, route, route_tokens

CTAS = 2  # of the grouped GEMM, or a pair


def product(case: Case) -> Subject:
    """A grouped GEMM, all of its results as bytes or numbers."""
    inputs = functools.cache(case.inputs)  # not yet

    def launched() -> Results:
        (x, w), given = inputs(), case.options()
        with mock.patch("moe.launch.sms_of", return_value=CTAS):
            result = grouped_gemm(x, w, case.offsets, **given)
        tensors = _bytes(result) if isinstance(result, Quantized) else (result,)
        return tensors if given["amax"] is None else (*tensors, given["amax"])

    return Subject(launched)


def _dependent() -> Results:
    """The launch before writes the offsets."""
    case = Case((9, 0, 5), 320, 64, pdl=True)
    experts = torch.arange(3).repeat_interleave(torch.tensor(case.counts))
    offsets = permutation(experts[:, None].int(), 3, arch="sm_100a").offsets
    return (grouped_gemm(*case.inputs(), offsets, **case.options()),)


def _mixed(stages: int, case: mixed_gemm.Case) -> Subject:
    """In one CTA, or a cluster, with a ring so short that it comes round in every tile."""
    inputs = functools.cache(case.inputs)  # not yet

    def launched() -> Results:
        with (
            mock.patch("moe.mixed.launch.sms_of", return_value=1),
            mock.patch(f"moe.mixed.sm{case.arch[3:-1]}.plan.MAX_STAGES", stages),
        ):
            return (mixed_gemm.call(case, inputs()),)

    return Subject(launched)


def _dependent_mixed() -> Results:
    """The launch before writes the offsets and the rows."""
    case = mixed_gemm.Case((9, 0, 5), 320, 64, slots=1, tile_rows=8, teams=1, pdl=True)
    experts = torch.arange(3).repeat_interleave(torch.tensor(case.counts))
    given = case.inputs()
    sorted_by = permutation(experts[:, None].int(), 3, arch="sm_90a")
    x = given.x[1:-1].nan_to_num().contiguous()
    offsets, rows = sorted_by.offsets, sorted_by.slot_of_row
    return (mixed_gemm.call(case, given, x=x, offsets=offsets, rows=rows),)


def _beside() -> Results:
    """Both products of three experts, each in two launches that run beside each other."""
    first = mixed_gemm.Case((9, 0, 5), 96, 64, teams=None, pdl=True, split=1)
    second = replace(first, k=64, columns=96, form=None)
    given = first.inputs()
    offsets = given.offsets
    with mock.patch("moe.mixed.launch.choose_tile_rows", return_value=(8, 16)):
        h = mixed_gemm.call(first, given)
        return h, mixed_gemm.call(second, second.inputs(), x=h, offsets=offsets)


def _rows() -> Results:
    """As they are and in e4m3, where experts have them; slots without a row."""
    x, ids = _normal(9, 320).bfloat16(), _ids(9, 2, 5)
    sorted_by = permutation(ids, 5, expert_range=(0, 3), arch="sm_90a")
    count = int(sorted_by.offsets[-1])
    results = []
    for out in ("bf16", "e4m3"):
        given = {"row_of_slot": sorted_by.row_of_slot.view(ids.shape), "rows": 18}
        rows, scale = write_rows(x, out, **given, backend="auto", arch="sm_90a")
        results += [rows[:count].float()] + ([] if scale is None else [scale[:count]])
    return tuple(results)


def _bytes(result: Quantized) -> Results:
    return result.data.view(torch.uint8), result.scales.view(torch.uint8)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _ids(tokens: int, choices: int, experts: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, experts, (tokens, choices), generator=generator).int()


def _permutation(tokens: int) -> Results:
    """More slots than there are threads: warps take turns; of two CTAs, rounds of turns."""
    with mock.patch("moe.routing.config.MAX_CHUNKS", 2):
        found = permutation(_ids(tokens, 4, 40), 40, arch="sm_100a")
    return found.offsets, found.slot_of_row, found.row_of_slot


def _route(scoring: str, **options: Any) -> Results:
    """The first token has the same logit for all experts."""
    logits = _normal(9, 256)
    logits[0] = 1.0
    return route(logits, 8, scoring=scoring, arch="sm_90a", **options)


def _route_tokens(experts: int, hidden: int) -> Results:
    """The launch before writes the tokens, the one behind reads what this one writes."""
    rows = torch.arange(9).int()
    x = combine(_normal(9, hidden).bfloat16(), torch.ones(9, 1), rows, arch="sm_90a")
    weight, bias = _normal(experts + 1, hidden).bfloat16(), _normal(experts).bfloat16()
    layer = RouterLinear(weight[1:] / 16, bias, ready=True)
    ids, weights = route_tokens(x, layer, Router(4, bias=_normal(experts)), arch="sm_90a")
    y = combine(_normal(36, 64).bfloat16(), weights, torch.arange(36).int(), arch="sm_90a")
    return x, ids, weights, y


def _quantise(fmt: str, **options: Any) -> Results:
    offsets = torch.tensor([0, 65, 65, 130]).int()
    given = {"rows": _ids(130, 1, 70)[:, 0], "offsets": offsets, "arch": "sm_100a"}
    return _bytes(quantise(_normal(70, 320).bfloat16(), fmt, **given, **options))


def _combine() -> Results:
    order = torch.randperm(10 * 4, generator=torch.Generator().manual_seed(0))
    rows, weights = order.view(10, 4).int(), _normal(10, 4)
    return (combine(_normal(40, 512).bfloat16(), weights, rows, arch="sm_90a"),)


QUANTISED = {"out": "nvfp4", "amax": True}
BIASED = {"tile_rows": 128, "out": "nvfp4"}  # and columns behind the last one
SUBJECTS: dict[str, Subject] = {
    "moe 128": product(Case((130, 0, 129, 5), 320, 192, tile_rows=128)),
    "moe 128 quantised": product(Case((130, 0, 129, 5), 320, 192, tile_rows=128, **QUANTISED)),
    "moe 128 x 256": product(Case((130, 0, 129, 5), 320, 384, tile_rows=128, tile_n=256)),
    "moe 128 mxfp8": product(
        Case((130, 0, 129, 5), 320, 192, fmt="mxfp8", tile_rows=128, out="mxfp8")
    ),
    "moe 128 mxfp4 plain": product(
        Case((130, 0, 129, 5), 320, 192, fmt="mxfp4", form=None, tile_rows=128)
    ),
    "moe pair": product(Case((260, 0, 129, 5), 320, 256, tile_rows=256, **QUANTISED)),
    "moe pair x 256": product(Case((260, 0, 129, 5), 320, 512, tile_rows=256, tile_n=256)),
    "moe swapped": product(Case((65, 0, 64, 5), 320, 192, tile_rows=64, **QUANTISED)),
    "moe bias": product(Case((130, 0, 129, 5), 320, 160, granularity=8, bias=True, **BIASED)),
    "moe swapped bias": product(Case((65, 0, 64, 5), 320, 136, form=None, bias=True, tile_rows=64)),
    "moe mxfp8 by mxfp4": product(
        Case((65, 0, 64), 2880, 96, "mxfp4", x_fmt="mxfp8", tile_rows=128)
    ),
    "moe dependent launch": Subject(_dependent, "depend"),
    # Narrow tiles have fewest instructions; the last step of K has one unit.
    "moe mixed": _mixed(
        3,
        mixed_gemm.Case((9, 0, 17), 704, 136, form=None, bias=True, room=3, tile_rows=8, teams=2),
    ),
    "moe mixed gathered": _mixed(
        4, mixed_gemm.Case((9, 0, 17), 704, 72, "nvfp4", slots=2, tile_rows=8, teams=2)
    ),
    "moe mixed, a stage in flight": _mixed(
        3,
        mixed_gemm.Case(
            (34, 0, 5), 1024, 40, form=(1.702, 1.0, 7.0), slots=2, tile_rows=64, teams=3, parts=1
        ),
    ),
    "moe mixed, one step": _mixed(
        5, mixed_gemm.Case((9, 9, 9, 9, 9), 96, 24, slots=2, tile_rows=8, teams=1)
    ),
    "moe mixed, shares of K": _mixed(
        3,
        mixed_gemm.Case(
            (9, 0, 17), 704, 136, form=None, room=3, tile_rows=8, teams=3, parts=1, split=2
        ),
    ),
    "moe mixed on Blackwell": _mixed(
        3,
        mixed_gemm.Case(
            (9, 0, 17),
            704,
            136,
            form=None,
            bias=True,
            room=3,
            tile_rows=16,
            teams=2,
            parts=1,
            arch="sm_100a",
        ),
    ),
    "moe mixed on Blackwell gathered": _mixed(
        4,
        mixed_gemm.Case(
            (34, 0, 5, 70),
            512,
            72,
            "nvfp4",
            slots=2,
            tile_rows=64,
            teams=2,
            parts=1,
            arch="sm_100a",
        ),
    ),
    "moe mixed dependent launch": Subject(_dependent_mixed, "depend"),
    "moe mixed beside each other": Subject(_beside, "depend"),
    "moe mixed rows": Subject(_rows),
    "moe permutation": Subject(lambda: _permutation(450)),
    "moe permutation in two": Subject(lambda: _permutation(1100)),
    "moe route softmax": Subject(lambda: _route("softmax")),
    "moe route sigmoid": Subject(lambda: _route("sigmoid", n_group=8, topk_group=4)),
    "moe route tokens": Subject(lambda: _route_tokens(32, 2880)),
    "moe route tokens, many experts": Subject(lambda: _route_tokens(160, 520)),
    "moe quantise nvfp4": Subject(lambda: _quantise("nvfp4", global_scale="tensor")),
    "moe quantise mxfp8": Subject(lambda: _quantise("mxfp8")),
    "moe combine": Subject(_combine),
}
