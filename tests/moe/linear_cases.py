"""Inputs for the router with its linear layer, and what must come out of them.

Where sums are exact in fp32 in any order, logits are, too, and experts are compared exactly: tokens
where two of them are almost equal are drawn again (`routing_cases`). Of other numbers a logit may
be rounded to either side of what it is, within the error of a sum, and any choice is right that is
one of logits between the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from kernelkit.numerics.tolerance import REFERENCE_FACTOR, compare_output, ulp
from lab.problems.grouped_gemm import checked
from moe import Router, RouterLinear, reference_routing, route_tokens
from tests.moe.routing_cases import DTYPES, Case, apart, draw_biases, rounded_exp

INF, NAN = math.inf, math.nan
CALIBRATING = 64  # tokens


@dataclass(frozen=True)
class Linear:
    """A call of `route_tokens`. route: of the logits, and how many tokens; its dtype is that of x.
    hostile: the second token and those behind it have NaN or infinities, as far as there are any.
    """

    route: Case
    hidden: int
    bias: bool = False
    ready: bool = True
    hostile: bool = False

    def __str__(self) -> str:
        flags = "-linear" * self.bias + "-late" * (not self.ready) + "-hostile" * self.hostile
        return f"h{self.hidden}-{self.route}{flags}"

    def router(self, device: str = "cpu") -> Router:
        """With its biases."""
        case, draw = self.route, torch.Generator().manual_seed(self.route.seed + 1)
        biases = {name: bias.to(device) for name, bias in draw_biases(case, draw).items()}
        return Router(case.top_k, **case.options(), **biases)

    def exact(self, tokens: int, device: str = "cpu") -> tuple[torch.Tensor, RouterLinear]:
        """(x [tokens, H], the layer) of small multiples of powers of two, whose sums fp32 has."""
        draw = torch.Generator().manual_seed(self.route.seed)
        layer = self._layer(lambda *shape: torch.randint(-8, 9, shape, generator=draw) / 8.0)
        router = self.router()

        def tokens_of(count: int) -> torch.Tensor:
            x = torch.randint(-8, 9, (count, self.hidden), generator=draw) / 8.0
            return x.to(DTYPES[self.route.dtype])

        x = tokens_of(tokens)
        while len(close := (~self._apart(x, layer, router)).nonzero()[:, 0]):
            x[close] = tokens_of(len(close))
        return self._placed(x, device), self._on(layer, device)

    def normal(self, tokens: int, device: str = "cpu") -> tuple[torch.Tensor, RouterLinear]:
        """The same of normal numbers."""
        draw = torch.Generator().manual_seed(self.route.seed)
        layer = self._layer(lambda *shape: torch.randn(shape, generator=draw))
        x = torch.randn(tokens, self.hidden, generator=draw).to(DTYPES[self.route.dtype])
        return self._placed(x, device), self._on(layer, device)

    def _layer(self, draw) -> RouterLinear:
        """Logits have a deviation of about one. A power of two keeps what is drawn exact."""
        dtype, experts = DTYPES[self.route.dtype], self.route.experts
        scale = 2.0 ** -round(math.log2(self.hidden) / 2 - 1)
        weight = (draw(experts, self.hidden) * scale).to(dtype)
        return RouterLinear(weight, draw(experts).to(dtype) if self.bias else None, self.ready)

    def _apart(self, x: torch.Tensor, layer: RouterLinear, router: Router) -> torch.Tensor:
        biases = {name: getattr(router, name) for name in ("bias", "logit_bias")}
        given = {name: bias for name, bias in biases.items() if bias is not None}
        return apart(self.route, logits_of(x, layer).to(x.dtype), given)

    def _placed(self, x: torch.Tensor, device: str) -> torch.Tensor:
        """Amid NaN."""
        if self.hostile:
            _add_specials(x)
        wide = torch.full((len(x) + 1, self.hidden + 16), NAN, dtype=x.dtype)
        wide[:-1, 8:-8] = x
        return wide.to(device)[:-1, 8:-8]

    def _on(self, layer: RouterLinear, device: str) -> RouterLinear:
        """Its weight amid NaN."""
        wide = torch.full((len(layer.weight) + 1, self.hidden + 8), NAN, dtype=layer.weight.dtype)
        wide[:-1, :-8] = layer.weight
        bias = None if layer.bias is None else layer.bias.to(device)
        return replace(layer, weight=wide.to(device)[:-1, :-8], bias=bias)


def logits_of(x: torch.Tensor, layer: RouterLinear) -> torch.Tensor:
    """[T, E], fp64."""
    logits = x.double() @ layer.weight.double().T
    return logits if layer.bias is None else logits + layer.bias.double()


def check_exact(case: Linear, arch: str | None = None, device: str = "cpu") -> None:
    """Ids exactly, weights within the calibrated tolerance."""
    x, layer = case.exact(case.route.tokens, device)
    router = case.router(device)
    with checked():
        ids, weights = route_tokens(x, layer, router, arch=arch)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    more, _ = replace(case, hostile=False).exact(CALIBRATING, device)
    logits = logits_of(torch.cat((x, more)), layer).to(x.dtype)
    compare(logits, ids, weights, router)


def check_normal(case: Linear, arch: str | None = None, device: str = "cpu") -> None:
    """Ids are those of some logits within the error of a sum. Where no logit that may be chosen can
    be rounded to either side, which is nearly everywhere, they are just those, and weights within
    the calibrated tolerance. The choice is by logits alone, and weights are of the chosen ones."""
    top_k = case.route.top_k
    assert case.route == Case(case.route.tokens, case.route.experts, top_k, case.route.dtype)
    x, layer = case.normal(case.route.tokens, device)
    router = case.router(device)
    with checked():
        ids, weights = route_tokens(x, layer, router, arch=arch)
    low, high = bounds(logits_of(x, layer), x, layer)
    least = low.float().topk(top_k, dim=1).values[:, -1:]  # of what is chosen
    assert (high.float().gather(1, ids.long()) >= least).all()
    sure = ((low == high) | (high < least)).all(1)
    assert sure.float().mean() >= 0.5, "hardly a token has logits that can be known"
    more, _ = case.normal(CALIBRATING, device)
    logits = torch.cat((low[sure], logits_of(more, layer).to(x.dtype)))
    compare(logits, ids[sure], weights[sure], router)


def bounds(
    exact: torch.Tensor, x: torch.Tensor, layer: RouterLinear
) -> tuple[torch.Tensor, torch.Tensor]:
    """What logits may be rounded to at least and at most: twice the error that torch's sums in fp32
    have, and an ulp."""
    bias = 0.0 if layer.bias is None else layer.bias.float()
    in_fp32 = (x.float() @ layer.weight.float().T + bias).double()
    error = REFERENCE_FACTOR * (in_fp32 - exact).abs().max()
    error = error + ulp(exact.abs().amax(1, keepdim=True), torch.float32)
    return (exact - error).to(x.dtype), (exact + error).to(x.dtype)


def compare(logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, router: Router) -> None:
    """Beside the routing of logits as they are rounded; those behind the tokens calibrate."""
    count, options = len(ids), vars(router)
    chosen, fixed = reference_routing.route(logits, **options)
    assert torch.equal(ids, chosen[:count]), "ids"
    top_k = router.top_k
    assert torch.equal(weights[:, top_k:], fixed[:count, top_k:])
    logits = logits.float() + (0.0 if router.logit_bias is None else router.logit_bias)
    exact, rounded = (
        reference_routing.weights_of(scores, chosen[:, :top_k], router.renormalize) * router.scale
        for scores in (
            reference_routing.scores(logits.double(), router.scoring),
            reference_routing.scores(logits, router.scoring, rounded_exp),
        )
    )
    got = torch.cat((weights[:, :top_k], rounded[count:]))
    report = compare_output(got, exact, rounded, torch.float32)
    assert report.ok, str(report)


def _add_specials(x: torch.Tensor) -> None:
    """To the tokens behind the first, as many as there are."""
    for row, value in zip(x[1:], (NAN, INF, -INF), strict=False):
        row[len(row) // 3] = value
