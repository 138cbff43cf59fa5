"""A layer of gpt-oss compared with transformers' own module, on a GPU, and a small one in the
emulator.

`python -m pytest --hw -m hw tests/moe/test_gpt_oss_hw.py` on compute capability 9.0, if
transformers is installed. Random weights are quantised to MXFP4; the module gets their values in
fp32 or bf16, and its eager forward is compared with `fused_moe` of arranged experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kernelkit.call.launch import emulation
from moe import Router, arrange, fused_moe, pack, route, unpack, unpack_biases
from moe.models import of_model
from ptxemu import Options

MAX_ERROR = 0.01  # norm over norm, for bf16: x, h, the rows of both products and the sum
FORM = of_model("gpt-oss-20b").activation


@dataclass(frozen=True)
class Size:
    hidden: int
    intermediate: int
    experts: int
    top_k: int


SMALL = Size(hidden=128, intermediate=64, experts=4, top_k=2)
FULL = Size(hidden=2880, intermediate=2880, experts=32, top_k=4)  # of gpt-oss-20b


@pytest.fixture(scope="module")
def gpt_oss() -> Any:
    """transformers' modules, with GptOssConfig."""
    reason = "transformers with gpt-oss is not installed: its module is what is compared with"
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss", reason=reason)
    return modeling


class Layer:
    """Weights of a size, packed and arranged for Hopper, and transformers' module with the same
    ones."""

    def __init__(self, gpt_oss: Any, size: Size, device: str, dtype: torch.dtype) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            drawn = torch.randn(shape, generator=generator, device=device) * scale
            return drawn.bfloat16()

        hidden, inner, count = size.hidden, size.intermediate, size.experts
        w13 = normal(count, 2 * inner, hidden, scale=hidden**-0.5)
        w2 = normal(count, hidden, inner, scale=inner**-0.5)
        biases = normal(count, 2 * inner), normal(count, hidden)
        packed = pack(w13, w2, "mxfp4", order="alternating", biases=biases)
        self.normal, self.size, self.experts = normal, size, arrange(packed)
        config = gpt_oss.GptOssConfig(
            hidden_size=hidden,
            intermediate_size=inner,
            num_local_experts=count,
            num_experts_per_tok=size.top_k,
            num_hidden_layers=1,
        )
        config._experts_implementation = "eager"
        with torch.device(device):
            self.module = gpt_oss.GptOssMLP(config).to(dtype).eval()
        router = self.module.router
        given = {
            "experts.gate_up_proj": alternating(unpack(packed, torch.float32)[0]).mT,
            "experts.down_proj": unpack(packed, torch.float32)[1].mT,
            "experts.gate_up_proj_bias": alternating(unpack_biases(packed)[0]),
            "experts.down_proj_bias": unpack_biases(packed)[1],
            "router.weight": normal(*router.weight.shape, scale=hidden**-0.5),
            "router.bias": normal(*router.bias.shape),
        }
        self.module.load_state_dict(given)  # all of them, and no others

    @torch.no_grad()
    def ours(self, x: torch.Tensor) -> torch.Tensor:
        router = self.module.router
        logits = torch.nn.functional.linear(x.float(), router.weight.float())
        chosen = Router(self.size.top_k, logit_bias=router.bias.float())
        return fused_moe(x, self.experts, logits, chosen, activation=FORM)

    @torch.no_grad()
    def theirs(self, x: torch.Tensor) -> torch.Tensor:
        """Run router and experts as the model does."""
        dtype = self.module.router.weight.dtype
        return self.module(x.to(dtype)[None])[0][0]

    @torch.no_grad()
    def experts_alone(self, x: torch.Tensor) -> torch.Tensor:
        """Run the module's experts with our router, in whose dtype no two logits are equal."""
        router = self.module.router
        logits = torch.nn.functional.linear(x.float(), router.weight.float(), router.bias.float())
        ids, weights = route(logits, self.size.top_k)
        experts, dtype = self.module.experts, router.weight.dtype
        return experts(x.to(dtype), ids.long(), weights.to(dtype))


def alternating(rows: torch.Tensor) -> torch.Tensor:
    """Interleave rows of gate and up; the input has all of gate first."""
    return torch.stack(rows.chunk(2, dim=1), dim=2).flatten(1, 2)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (actual.double() - expected.double()).norm()
    return (difference / expected.double().norm()).item()


def test_a_small_layer_in_the_emulator(gpt_oss):
    layer = Layer(gpt_oss, SMALL, "cpu", torch.float32)
    x = layer.normal(5, SMALL.hidden)
    with emulation(Options(check=True)):
        y = layer.ours(x)
        alone = layer.experts_alone(x)
    assert error(y, layer.theirs(x)) < MAX_ERROR
    assert error(alone, layer.theirs(x)) < 1e-5
    wrong = layer.theirs(x.roll(1, 0))
    assert error(y, wrong) > 0.1


@pytest.mark.hw
@pytest.mark.xdist_group("gpt-oss-hw")
@pytest.mark.parametrize("size", [SMALL, FULL], ids=["small", "full"])
def test_in_fp32(gpt_oss, size):
    """The whole MLP, including its router."""
    layer = Layer(gpt_oss, size, "cuda", torch.float32)
    for tokens in (1, 7, 64, 1000):
        x = layer.normal(tokens, size.hidden)
        found = error(layer.ours(x), layer.theirs(x))
        print(f"{size}, {tokens} tokens: {found:.2e}")
        assert found <= MAX_ERROR


@pytest.mark.hw
@pytest.mark.xdist_group("gpt-oss-hw")
@pytest.mark.parametrize("size", [SMALL, FULL], ids=["small", "full"])
def test_in_bf16(gpt_oss, size):
    """The experts as a model in bf16 runs them, which rounds more often than the kernels do."""
    layer = Layer(gpt_oss, size, "cuda", torch.bfloat16)
    for tokens in (1, 64, 1000):
        x = layer.normal(tokens, size.hidden)
        found = error(layer.ours(x), layer.experts_alone(x))
        print(f"{size}, {tokens} tokens: {found:.2e}")
        assert found <= MAX_ERROR
