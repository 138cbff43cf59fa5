"""`mixed_gemm` as torch sees it: operator, fake, compiled code; and refusals, naming value and
limit, before anything is compiled.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._pytree import tree_map_only

import moe.mixed.launch
from lab.problems.grouped_gemm import checked
from lab.problems.mixed_gemm import PLANS, Case, call
from moe import Router, SwiGLU, arrange, fused_moe, mixed_gemm, pack
from moe.mixed.choose import choices
from moe.mixed.config import MixedConfig
from moe.mixed.fragments import fragments
from moe.mixed.launch import MIXED_GEMM
from moe.mixed.plan import TILE_STAGES
from moe.sm100 import plan as blackwell
from tests.moe.mixed_space import TILES_OF
from tests.support.attentions import metadata

pytestmark = pytest.mark.usefixtures("two_ctas")

GATHERED = Case((3, 0, 9), 96, 24, "nvfp4", (1.702, 1.0, 7.0), bias=True, slots=2)
PLAIN = Case((3, 0, 9), 96, 40, form=None, out="fp16")
CASES = pytest.mark.parametrize("case", [GATHERED, PLAIN], ids=["gathered", "plain"])


def given(case: Case, **changes: Any) -> dict[str, Any]:
    """Keywords of `mixed_gemm`."""
    return {**case.inputs().tensors, **case.options(), **changes}


def flat(case: Case, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the operator's arguments for a call."""
    seen = []
    monkeypatch.setattr("moe.mixed.api.MIXED_GEMM", seen.append)
    mixed_gemm(**given(case))
    monkeypatch.undo()
    return MIXED_GEMM.schema.flat(seen[0])


@CASES
def test_opcheck(case, monkeypatch):
    tests = ("test_schema", "test_autograd_registration", "test_faketensor",
             "test_aot_dispatch_dynamic")  # fmt: skip
    opcheck(MIXED_GEMM.default, (), flat(case, monkeypatch), test_utils=tests)


@CASES
def test_the_operator_gets_the_whole_call(case, monkeypatch):
    """A call without an activation passes None, although every number of one has a default."""
    found = MIXED_GEMM.schema.build(flat(case, monkeypatch))
    wanted = given(case)
    assert (found.activation is None) == (case.form is None)
    if case.form:
        form = found.activation
        assert (form.alpha, form.beta, form.limit) == case.form
    assert (found.slots, found.out) == (wanted["slots"], case.out)
    for name in ("x", "offsets", "bias", "rows"):
        mine, other = getattr(found, name), wanted[name]
        assert (mine is None) == (other is None)
        assert mine is None or mine.shape == other.shape
    assert (found.w.rows, found.w.k, found.w.fmt) == (case.rows_of_w, case.k, case.fmt)


@CASES
def test_fake_tensors_know_what_the_product_will_return(case, monkeypatch):
    """Compared with a call that does everything except compiling and launching."""
    arguments = flat(case, monkeypatch)
    monkeypatch.setattr(moe.mixed.launch, "compile_once", lambda *_: None)
    monkeypatch.setattr(moe.mixed.launch, "launch", lambda *_: None)
    real = MIXED_GEMM.default(**arguments)
    with FakeTensorMode() as mode:
        fakes = tree_map_only(torch.Tensor, mode.from_tensor, arguments)
        assert metadata([MIXED_GEMM.default(**fakes)]) == metadata([real])
    assert real.shape == (case.rows, case.columns)


def test_compiled_code_runs_the_product():
    arguments = given(GATHERED)
    x = arguments.pop("x")

    def step(x):
        return mixed_gemm(x * 2, **arguments) + 1

    with checked():
        wanted = step(x)
        found = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(found, wanted)


def test_a_b300_has_the_tiles_of_a_b200(monkeypatch):
    """Kernels for sm_100a serve sm_103a, by default and where tiles are measured."""
    seen = []
    monkeypatch.setattr("moe.mixed.api.MIXED_GEMM", seen.append)
    for arch in ("sm_100a", "sm_103a"):
        mixed_gemm(**given(replace(PLAIN, arch=arch)))
    b200, b300 = (MIXED_GEMM.arguments(each, alone=True) for each in seen)
    assert (b300.target.arch, b300.kernel_arch) == ("sm_103a", "sm_100a")
    assert b300.configs == b200.configs
    assert b300.gathers == b200.gathers
    problem = b200.problem()
    assert choices(problem, "sm_103a") == choices(problem, "sm_100a")


# -- limits ---------------------------------------------------------------------------------------


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers).int()


NARROW = Case((3,), 32, 8, form=None)
ON_BLACKWELL = replace(PLAIN, arch="sm_100a")
X = torch.zeros(12, 96, dtype=torch.bfloat16)


@pytest.mark.usefixtures("no_compile")
@pytest.mark.parametrize(("case", "error", "words", "changes"), [
    (PLAIN, ValueError, "activation Activation.*, but the rows of w have no gate",
     {"activation": SwiGLU()}),
    (GATHERED, ValueError, "activation None, but the rows of w alternate gate and up",
     {"activation": None}),
    (GATHERED, TypeError, "activation is 'silu'", {"activation": "silu"}),
    (GATHERED, ValueError, "alpha inf", {"activation": SwiGLU(math.inf)}),
    (PLAIN, NotImplementedError, r"x is torch\.float16, expected torch\.bfloat16", {"x": X.half()}),
    (PLAIN, ValueError, r"x is torch.bfloat16 \(12, 64\), expected", {"x": X[:, :64].clone()}),
    (PLAIN, ValueError, "x has strides .*: not contiguous",
     {"x": torch.zeros(12, 192).bfloat16()[:, :96]}),
    (PLAIN, ValueError, "x .*16", {"x": torch.zeros(12 * 96 + 1).bfloat16()[1:].view(12, 96)}),
    (PLAIN, NotImplementedError, "out fp32: one of", {"out": torch.float32}),
    (PLAIN, NotImplementedError, "out torch.int8", {"out": torch.int8}),
    (PLAIN, ValueError, r"offsets is torch.int32 \(3,\), expected", {"offsets": ints(0, 3, 3)}),
    (PLAIN, ValueError, r"offsets \[0, 3, 2, 12\]: not ascending", {"offsets": ints(0, 3, 2, 12)}),
    (PLAIN, ValueError, "to at most 12, the rows of x", {"offsets": ints(0, 3, 3, 13)}),
    (GATHERED, ValueError, r"bias is torch.float32 \(3, 24\), expected", {
        "bias": torch.zeros(3, 24)}),
    (GATHERED, ValueError, "bias is torch.bfloat16", {"bias": torch.zeros(3, 48).bfloat16()}),
    (GATHERED, ValueError, "rows is torch.int64", {"rows": torch.zeros(12).long()}),
    (GATHERED, ValueError, "rows has values from 0 to 99, but x has 16 slots",
     {"rows": torch.full((12,), 99).int().index_fill_(0, torch.tensor([0]), 0)}),
    (GATHERED, ValueError, "slots 0: at least 1", {"slots": 0}),
    (PLAIN, ValueError, "slots 2: 1 without rows", {"slots": 2}),
    (PLAIN, ValueError, "parts 2 without teams: give both or neither", {"parts": 2}),
    (PLAIN, ValueError, "most_rows 8: at least 9 of an expert", {"most_rows": 8}),
    (PLAIN, NotImplementedError, "tile_rows 24: one of", {"tile_rows": 24}),
    (PLAIN, NotImplementedError, "teams 7: one of", {"teams": 7}),
    (PLAIN, NotImplementedError, "parts 3: one of", {"teams": 1, "parts": 3}),
    (PLAIN, ValueError, "tile_rows 128 with 4 warpgroups of 1 x 64 rows of weights in bf16: 124",
     {"tile_rows": 128, "teams": 4}),
    (PLAIN, NotImplementedError, "arch .sm_80.: this kernel accepts sm_100a, sm_90a",
     {"arch": "sm_80"}),
    (ON_BLACKWELL, NotImplementedError, r"tile_rows 8: one of \(16, 32", {"tile_rows": 8}),
    (ON_BLACKWELL, NotImplementedError, "teams 3 of 1 x 64 rows of weights on sm_100a: 128 or 256",
     {"teams": 3}),
    (ON_BLACKWELL, NotImplementedError, "teams 4 of 2 x 64 rows of weights on sm_100a: 128 or 256",
     {"teams": 4, "parts": 2}),
    (ON_BLACKWELL, ValueError, "tile_rows 256 with 2 x 128 rows of weights: 640 columns of tensor",
     {"tile_rows": 256, "teams": 2, "parts": 2}),
    (replace(ON_BLACKWELL, columns=48), NotImplementedError,
     "out 'e4m3' on sm_100a: .* packed experts in mxfp4",
     {"out": torch.float8_e4m3fn, "out_scale": torch.ones(1)}),
    (PLAIN, ValueError, "backend 'cuda' needs CUDA tensors", {"backend": "cuda"}),
    (PLAIN, TypeError, "w is Tensor, expected Fragments", {"w": X}),
    (PLAIN, NotImplementedError, "requires", {"x": X.float().requires_grad_()}),
    (replace(NARROW, columns=4), NotImplementedError, "4 columns of output: a multiple of 8", {}),
    (NARROW, TypeError, "pdl is 1, expected bool", {"pdl": 1}),
])  # fmt: skip
def test_refused(case, error, words, changes):
    with pytest.raises(error, match=words):
        mixed_gemm(**given(case, **changes))


@pytest.mark.usefixtures("no_compile")
@pytest.mark.parametrize("most", [None, 0])
def test_no_rows_no_launch(most):
    """A layer without tokens passes zero."""
    nobody = {"x": X[:0], "offsets": ints(0, 0, 0, 0), "most_rows": most}
    assert mixed_gemm(**given(PLAIN, **nobody)).shape == (0, 40)


@pytest.mark.parametrize("most", [9, 1 << 20])
def test_the_most_rows_that_an_expert_has(most):
    """The bound may be exact, or larger."""
    with checked():
        result = call(PLAIN, PLAIN.inputs(), most_rows=most)
        assert torch.equal(result, call(PLAIN, PLAIN.inputs()))


@pytest.mark.usefixtures("no_compile")
def test_rows_in_e4m3_are_refused_on_blackwell():
    """The error names the alternative, also for experts that are arranged for such rows."""
    inputs = PLAIN.inputs()
    w = fragments(inputs.quantised, x="e4m3")
    words = "x 'e4m3' on sm_100a: .* packed experts in mxfp4, .* activations='mxfp8'"
    given = {"x": inputs.x.to(torch.float8_e4m3fn), "w": w, "x_scale": torch.ones(1)}
    with pytest.raises(NotImplementedError, match=words):
        mixed_gemm(offsets=inputs.offsets, arch="sm_100a", **given)
    packed = pack(torch.zeros(2, 64, 32).bfloat16(), torch.zeros(2, 32, 32).bfloat16(), "mxfp4")
    with pytest.raises(NotImplementedError, match=words):
        fused_moe(X[:, :32], arrange(packed, "e4m3"), torch.zeros(12, 2), Router(1))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_tile_has_a_plan(arch):
    for tile in TILES_OF[arch]:
        for gathers in (False, True):
            plan = PLANS[arch](MixedConfig(swiglu=True, gather=gathers, **tile))
            assert plan.ahead <= plan.stages - plan.lag - 1
            assert plan.stages >= plan.lag + 1 + gathers
            assert plan.roles.threads <= 1024
            assert plan.widths[0] == tile["tile_rows"]


def test_the_queue_is_that_of_the_scheduler():
    """The scheduler serves Blackwell, too."""
    assert TILE_STAGES == blackwell.TILE_STAGES
