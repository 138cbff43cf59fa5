"""bench.py moe --model without a GPU: weights, routing, peers, the check before every time, rates
by hand, tables and files. The kernels run in the emulator.
"""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from lab.bench import moe, moe_peers
from lab.bench.gqa_peers import error_of
from lab.bench.moe import by_subject, markdown, ranked, summary
from lab.bench.moe_peers import PARTS, PEERS, Ours, Torch, Triton
from lab.flags import moe as flags
from lab.measure.turns import Turn
from lab.problems.moe_models import Model, logits_of, model_of, tokens_of, values
from lab.tools.common import save_rows
from lab.tools.style import LOOKS
from moe import reference, unpack
from moe.models import CONFIGS, of_model
from moe.packing import pack_quantised
from moe.reference_routing import route

MACHINE = {"read_tbs": 2.0, "tensor_tflops": 500.0}


def small(name: str, fmt: str = "mxfp4") -> Model:
    """A model's router and activation over 16 experts of 128 x 64."""
    layer = replace(of_model(name), hidden=128, intermediate=64, experts=16)
    return model_of(name, fmt, "cpu", layer=layer)


@pytest.fixture(scope="module")
def gpt_oss() -> Model:
    return small("gpt-oss-20b")


# -- random problems ------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_weights_are_those_that_are_packed(fmt):
    """Values are exact, and products of standard normal numbers stay about as large."""
    model = small("qwen3-30b-a3b", fmt)
    plain = [values(w, fmt) for w in (model.w13, model.w2)]
    for mine, packed in zip(plain, unpack(pack_quantised(model.w13, model.w2, fmt)), strict=True):
        assert mine.dtype == torch.bfloat16
        assert torch.equal(mine.double(), packed)
    assert 0.5 < plain[0].float().std() * 128**0.5 < 1.5
    assert model.biases == (None, None)


def test_experts_are_chosen_as_they_say():
    layer = of_model("gpt-oss-120b")
    tops = {
        name: torch.bincount(logits_of(name, 512, layer, "cpu").topk(4)[1].flatten(), minlength=128)
        for name in flags.ROUTINGS
    }
    assert set(tops["balanced"].tolist()) == {16}
    assert 18 < tops["random"].max() < 40
    assert tops["power-law"].max() > 256 > 8 > tops["power-law"].min()


def test_groups_leave_a_balanced_router_balanced():
    model = replace(small("deepseek-v3"), layer=of_model("deepseek-v3"))
    counts = tokens_of(model, 64, "balanced").counts
    assert counts == [2] * 256 + [64]


# -- peers ----------------------------------------------------------------------------------------


def test_names_are_those_of_the_flags():
    assert set(flags.MODEL_NAMES) == set(CONFIGS)
    assert (*PEERS,) == flags.PEERS
    assert {*PEERS} <= LOOKS.keys()
    assert flags.PARTS == PARTS


@pytest.mark.parametrize(("name", "fmt"), [("gpt-oss-20b", "mxfp4"), ("deepseek-v3", "nvfp4")])
def test_ours_and_torch_agree(name, fmt):
    model = small(name, fmt)
    tokens, ours, theirs = (
        tokens_of(model, 5, "power-law"),
        Ours(model, backend="auto"),
        Torch(model),
    )
    for part in PARTS:
        y = ours.launch(part, tokens)()
        assert error_of(theirs.launch(part, tokens)(), y.float()) < moe.MAX_ERROR["bf16"], part
        assert torch.equal(ours.planned(part, tokens)(), y)


def test_ours_in_e4m3_is_as_far_off_as_said(gpt_oss):
    """The error in e4m3 exceeds the limit of bf16 peers, and is within its own limit, also that of
    each product, whose rows are quantised before."""
    tokens, where = tokens_of(gpt_oss, 5, "random"), {"backend": "emulate", "arch": "sm_90a"}
    coarse, fine = Ours(gpt_oss, "e4m3", **where), Ours(gpt_oss, **where)
    y = fine.launch("layer", tokens)().float()
    assert moe.MAX_ERROR["bf16"] < error_of(coarse.planned("layer", tokens)(), y) < coarse.max_error
    for part in ("w13-ordered", "w2"):
        y = fine.launch(part, tokens)().float()
        assert 0.01 < error_of(coarse.launch(part, tokens)(), y) < coarse.max_error, part


def test_ours_is_the_definition(gpt_oss):
    tokens, layer = tokens_of(gpt_oss, 3, "random"), gpt_oss.layer
    y = Ours(gpt_oss, backend="auto").launch("layer", tokens)()
    w13 = values(gpt_oss.w13, "mxfp4")
    w13, w2 = torch.cat((w13[:, ::2], w13[:, 1::2]), 1), values(gpt_oss.w2, "mxfp4")
    bias = gpt_oss.biases[0]
    biases = torch.cat((bias[:, ::2], bias[:, 1::2]), 1), gpt_oss.biases[1]
    routed = route(tokens.logits, **vars(layer.router))
    exact = reference.layer(tokens.x, w13, w2, routed, biases=biases, **vars(layer.activation))
    assert error_of(y, exact.float()) < 0.01


def routing(logits, top_k):
    """Experts of a token in ascending order, rows by expert."""
    ids = logits.topk(top_k)[1].sort(-1)[0]
    experts = ids.flatten()
    slots = experts.argsort(stable=True)
    scales = logits.gather(1, ids).softmax(-1).flatten()[slots]
    index = SimpleNamespace(src_indx=slots, top_k=top_k)
    return SimpleNamespace(gate_scal=scales, experts=experts[slots]), index, index


def matmul_ogs(x, w, bias, routed, *, precision_config, gather_indx=None, scatter_indx=None,
               gammas=None, fused_activation=None):  # fmt: skip
    """Products with weights [E, K, N], with gather, scatter, and SwiGLU of interleaved columns."""
    assert w.data.stride(-2) == precision_config.weight_scale.data.stride(-2) == 1
    if gather_indx:
        x = x[gather_indx.src_indx // gather_indx.top_k]
    plain = values(SimpleNamespace(data=w.data.mT, scales=precision_config.weight_scale.data.mT,
                                   decode_scale=None), "mxfp4")  # fmt: skip
    y = torch.einsum("rk,rnk->rn", x.float(), plain.float()[routed.experts])
    y = y + bias[routed.experts]
    if fused_activation:
        alpha, limit = fused_activation.fn_args
        gate, up = y[:, ::2].clamp(max=limit), y[:, 1::2].clamp(-limit, limit)
        y = gate * torch.sigmoid(alpha * gate) * (up + 1)
    y = y if gammas is None else y * gammas[:, None]
    if scatter_indx:
        tokens = scatter_indx.src_indx // scatter_indx.top_k
        rows = len(y) // scatter_indx.top_k
        y = torch.zeros(rows, y.shape[1]).index_add_(0, tokens, y)
    return y.bfloat16()


@pytest.fixture
def triton(monkeypatch, tmp_path):
    """The part of `triton_kernels` that a peer uses, in torch; returns the requested layouts."""

    def record(*names):
        return lambda *values, **named: SimpleNamespace(**dict(zip(names, values)), **named)  # noqa: B905

    laid_out = []
    layouts = {"StridedLayout": "strided"}
    for kind in ("w", "w_scale"):
        layouts[f"make_default_matmul_mxfp4_{kind}_layout"] = lambda mx_axis, kind=kind, **more: (
            kind,
            {"mx_axis": mx_axis, **more},
        )

    def convert_layout(tensor, layout, **options):
        laid_out.append((layout, options))
        return tensor

    found = {
        "matmul_ogs": {
            "__file__": str(tmp_path / "matmul_ogs.py"), "matmul_ogs": matmul_ogs,
            "FlexCtx": record(), "PrecisionConfig": record(),
            "FnSpecs": record("name", "fn", "names"),
            "FusedActivation": record("specs", "fn_args", "reduction_n"),
        },
        "numerics": {"InFlexData": record()},
        "routing": {"routing": routing},
        "swiglu": {"swiglu_fn": object()},
        "tensor": {"FP4": "fp4", "convert_layout": convert_layout,
                   "wrap_torch_tensor": lambda data, dtype=None: SimpleNamespace(data=data)},
        "tensor_details": {"layout": SimpleNamespace(**layouts)},
    }  # fmt: skip
    package = ModuleType("triton_kernels")
    monkeypatch.setitem(sys.modules, "triton_kernels", package)
    for name, members in found.items():
        module = ModuleType(f"triton_kernels.{name}")
        vars(module).update(members)
        setattr(package, name, module)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return laid_out


def test_triton_is_asked_for_the_same_layer(gpt_oss, triton):
    tokens, ours = tokens_of(gpt_oss, 4, "random"), Ours(gpt_oss, backend="auto")
    peer = Triton(gpt_oss)
    assert re.fullmatch("[0-9a-f]{12}", peer.sources)
    assert {name for name, _ in triton} == {"w", "w_scale"}
    assert ("w_scale", {"mx_axis": 1, "num_warps": 8}) in triton
    for part in PARTS:
        y = ours.launch(part, tokens)()
        assert error_of(peer.launch(part, tokens)(), y.float()) < 0.01, part
    triton.clear()
    Triton(gpt_oss, swizzled=False)
    assert {name for name, _ in triton} == {"strided"}


def test_triton_refuses_what_it_does_not_compute(triton):
    with pytest.raises(NotImplementedError, match="weights in nvfp4: mxfp4"):
        Triton(small("gpt-oss-20b", "nvfp4"))
    model = small("mixtral-8x7b")
    with pytest.raises(NotImplementedError, match="its SwiGLU is that of gpt-oss"):
        Triton(model).launch("layer", tokens_of(model, 2, "random"))
    assert Triton(model).launch("w2", tokens_of(model, 2, "random"))


# -- times ----------------------------------------------------------------------------------------


def test_rates_by_hand(gpt_oss):
    """Three tokens with four experts each: twelve rows; an expert has 24,576 values of 4.25
    bits."""
    tokens = tokens_of(gpt_oss, 3, "balanced")
    found = moe.sizes_of("layer", tokens)
    assert (found["experts"], found["most_rows"]) == (12, 1)
    assert found["flop"] == 2 * 12 * 3 * 128 * 64
    assert found["weight_bytes"] == 12 * 3 * 128 * 64 * 17 // 32
    assert found["nbytes"] == found["weight_bytes"] + 2 * 2 * 3 * 128
    second = moe.sizes_of("w2", tokens)
    assert second["nbytes"] == 12 * 128 * 64 * 17 // 32 + 2 * 12 * (64 + 128)
    row = moe.with_rates({"us": 10.0, "nbytes": 8e6, "flop": 5e8, "weight_bytes": 4e6}, MACHINE)
    assert (row["bound"], row["bound_us"], row["of_bound"]) == ("memory", 4.0, 0.4)
    assert (row["tflops"], row["weight_gbs"]) == pytest.approx((50.0, 400.0))


@pytest.fixture
def timed(monkeypatch, gpt_oss):
    """Rows of a part for peers with given launches, with times of a simulated GPU."""
    monkeypatch.setattr(moe, "graph_of", lambda launch: launch)
    monkeypatch.setattr(moe, "host_us", lambda launch: 7.0)
    monkeypatch.setattr(moe, "Contestant", lambda launch, _: lambda: Turn(launch.us, {"watts": 9}))

    def run(part: str = "layer", **peers) -> list[dict]:
        tokens = tokens_of(gpt_oss, 2, "random")
        options = Namespace(flush=False, rounds=3, machine=MACHINE)
        return moe.time_part(part, tokens, peers, options)

    return run


class Fixed:
    """A peer whose every launch takes `us` and returns `y`."""

    def __init__(self, y: torch.Tensor, us: float) -> None:
        self.y, self.us = y, us

    def launch(self, part, tokens):
        def call() -> torch.Tensor:
            return self.y

        call.us = self.us
        return call


def test_who_is_wrong_or_missing_has_no_time(timed):
    y = torch.ones(2, 128)
    rows = timed(moe=Fixed(y, 8.0), triton=Fixed(y * 1.03, 1.0), torch="not installed: no torch",
                 other=Fixed(y * 1.001, 16.0))  # fmt: skip
    by_peer = {(row["peer"], row["how"]): row for row in rows}
    assert len(rows) == 8
    assert by_peer["moe", "graph"]["us"] == 8.0
    assert by_peer["moe", "graph"]["of_best"] == 2.0
    assert by_peer["moe", "eager"]["host_us"] == 7.0
    assert by_peer["moe", "graph"]["watts"] == 9
    assert "wrong: a row is 3.0% off moe's" in by_peer["triton", "graph"]["refused"]
    assert by_peer["torch", "eager"]["refused"] == "not installed: no torch"
    assert "us" not in by_peer["triton", "eager"]
    assert by_peer["other", "graph"]["error"] == pytest.approx(0.001, rel=0.1)
    assert {row["tokens"] for row in rows} == {2}


def test_a_slow_host_is_said(timed, monkeypatch):
    def slow(launch, _):
        raise RuntimeError("5 calls take the host longer than the GPU")

    monkeypatch.setattr(moe, "Contestant", slow)
    rows = timed(moe=Fixed(torch.ones(2, 128), 8.0))
    assert {row["refused"] for row in rows} == {
        "RuntimeError: 5 calls take the host longer than the GPU"
    }


def test_the_host_is_timed_alone(gpt_oss):
    made = []
    assert moe.host_us(lambda: made.append(0)) > 0
    assert len(made) == moe.HOST_SAMPLES * moe.HOST_CALLS


def test_peers_are_made_once_and_say_what_is_not_there(gpt_oss, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton_kernels", None)
    found, rows = moe.made(gpt_oss, ["moe", "triton", "torch"])
    assert isinstance(found["moe"], Ours)
    assert isinstance(found["torch"], Torch)
    assert found["triton"].startswith("not installed: ")
    assert [row.get("refused", "")[:13] for row in rows] == ["", "not installed", ""]
    assert all(row["seconds"] >= 0 for row in rows if "refused" not in row)


# -- tables and files -----------------------------------------------------------------------------


def row(peer: str = "moe", tokens: int = 1, us: float = 2.0, how: str = "graph", **more) -> dict:
    same = {"kind": "layer", "model": "gpt-oss-120b", "fmt": "mxfp4", "part": "layer"}
    sizes = {"routing": "random", "tokens": tokens, "experts": 4, "most_rows": 1}
    sizes |= {"nbytes": 1e6, "flop": 1e6, "weight_bytes": 1e6}
    return moe.with_rates({**same, **sizes, "peer": peer, "how": how, "us": us}, MACHINE) | more


def test_tables_mark_the_quickest():
    rows = [row(), row("triton", us=4.0), row(tokens=64, us=120.4), row("triton", 64, 90.0)]
    missing = row("torch")
    del missing["us"]
    rows.append(missing | {"refused": "not installed: triton"})
    _, heads, lines = summary(rows)
    assert heads == ["layer", "peer", "1", "64", ""]
    name = "gpt-oss-120b, mxfp4, layer, random"
    assert lines[0] == [name, "moe", "2.0 *", "120", ""]
    assert lines[1] == [name, "triton", "4.0", "90.0 *", ""]
    assert lines[2] == [name, "torch", "-", "-", "not installed: triton"]
    assert "| **2.0** | 120 |" in markdown(rows)
    assert [found["of_best"] for found in ranked(rows[:2])] == [2.0, 1.0]
    assert len([*by_subject(rows)]) == 1


def test_a_file_is_shown_again(printed, run, tmp_path):
    file = tmp_path / "moe.json"
    head = {"kind": "setting", "date": "2026-11-26", "order": "10 rounds", "gpu": {"name": "H200"}}
    weights = {"kind": "weights", "model": "gpt-oss-120b", "fmt": "mxfp4", "peer": "moe"}
    weights |= {"seconds": 1.5, "held_bytes": 17e8, "more_bytes": 51e8}
    rows = [row(), row("triton", us=4.0), row(how="eager", us=2.5, host_us=9.0)]
    save_rows(file, [head, weights, *rows])
    shown = printed("bench.py moe --show", file, "--plot", tmp_path / "a" / "moe.png")
    assert "H200, 2026-11-26, 10 rounds" in shown
    assert "4 experts have rows, 1 at most" in shown
    assert "1.70" in shown
    assert (tmp_path / "a" / "moe.png").stat().st_size > 1000
    assert "| moe | **2.0** |" in printed("bench.py moe --markdown --show", file)
    assert "triton" not in printed("bench.py moe --peers moe --show", file)
    assert "no times with this" in run("bench.py moe --peers torch --show", file).stderr


def test_without_a_gpu_sizes_are_said(written):
    out, (_, *rows) = written("bench.py moe --model deepseek-v3 --tokens 1 64 --parts w2 layer")
    assert "moe is not timed: no GPU of compute capability 9.0 or 10.x here" in out
    assert [(each["part"], each["tokens"], each["experts"]) for each in rows] == [
        ("w2", 1, 9), ("layer", 1, 9), ("w2", 64, 257), ("layer", 64, 257)
    ]  # fmt: skip
    assert rows[0]["flop"] == 2 * 9 * 7168 * 2048


@pytest.mark.parametrize(("more", "words"), [
    ("--routing random", "--routing: only with --model"),
    ("--model gpt-oss-20b --steps route", "--steps: not with --model"),
    ("--model gpt-oss-20b --markdown", "--markdown without --show"),
])  # fmt: skip
def test_refused(run, more, words):
    result = run(f"bench.py moe {more}")
    assert result.returncode == 2
    assert result.stderr.startswith(f"refused: {words}")


@pytest.mark.hw
@pytest.mark.parametrize("part", PARTS)
def test_peers_agree_on_a_gpu(part):
    """All installed peers, at the sizes of gpt-oss-20b."""
    model = model_of("gpt-oss-20b", "mxfp4", "cuda")
    peers, _ = moe.made(model, [*PEERS])
    tokens = tokens_of(model, 64, "random")
    rows = [{"peer": name, "how": how} for name in peers for how in (moe.GRAPH, moe.EAGER)]
    found = [row["peer"] for row, _ in moe.launches_of(part, tokens, peers, rows)]
    assert {moe_peers.OURS, "torch"} <= set(found)
    wrong = [row for row in rows if "wrong" in row.get("refused", "")]
    assert not wrong


def test_steps_are_a_peer_of_the_layer_alone(gpt_oss):
    steps = PEERS["moe-steps"](gpt_oss)
    tokens = tokens_of(gpt_oss, 3, "random")
    assert steps.launch("layer", tokens).keywords["few_rows"] is False
    assert Ours(gpt_oss).launch("layer", tokens).keywords["few_rows"] is None
    with pytest.raises(NotImplementedError, match="w13 is that of 'moe'"):
        steps.launch("w13", tokens)
