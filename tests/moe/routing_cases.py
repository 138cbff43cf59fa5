"""Inputs for the routing kernels that are hostile by default, and their expected results."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernelkit.numerics.tolerance import REFERENCE_FACTOR, compare_output, ulp
from lab.problems.grouped_gemm import CHECKED, checked
from moe import Router, RouterLinear, reference_routing, route_tokens
from moe import reference_routing as reference
from moe.routing import combine, permutation, route
from ptxemu import Options
from tests.kernelkit.merge_cases import EXP2_BITS

# ---- Inputs for the routing kernels that are hostile by default, and their expected results
#
# Ids are compared exactly, so scores that decide a choice must be clearly apart or equal: tokens in
# which two of them are closer than GAP, but not equal, are drawn again.

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STEP = 2.0**-6  # logits are multiples of it, so that many are equal and none almost equal
CALIBRATING = 64  # tokens
GAP = 1e-5  # minimum relative difference between scores that decide


@dataclass(frozen=True)
class Routing:
    """A call of `route`.

    hostile: the first tokens have NaN, infinities, or equal logits.
    aligned: rows of logits begin at multiples of 16 bytes.
    """

    tokens: int
    experts: int
    top_k: int
    dtype: str = "fp32"
    scoring: str = "softmax"
    bias: bool = False
    groups: tuple[int, int] = (1, 1)
    renormalize: bool = True
    scale: float = 1.0
    hostile: bool = True
    seed: int = 0
    aligned: bool = False
    logit_bias: bool = False
    shared: int = 0

    def __str__(self) -> str:
        flags = "-bias" * self.bias + "-plain" * (not self.renormalize)
        flags += "-aligned" * self.aligned + "-linear" * self.logit_bias
        flags += f"-shared{self.shared}" * bool(self.shared)
        groups = "" if self.groups == (1, 1) else f"-groups{self.groups[1]}of{self.groups[0]}"
        sizes = f"{self.tokens}x{self.experts}-k{self.top_k}"
        return f"{sizes}-{self.dtype}-{self.scoring}{groups}{flags}"

    def options(self) -> dict[str, Any]:
        """Keyword arguments that are no tensors."""
        n_group, topk_group = self.groups
        given = {"scoring": self.scoring, "renormalize": self.renormalize, "scale": self.scale}
        given |= {"shared": self.shared, "shared_weight": 0.75}
        return given | {"n_group": n_group, "topk_group": topk_group}


def emulated(run: Any) -> Any:
    """Run run() in the emulator; the checker must report nothing."""
    with checked():
        return run()


def build(case: Routing, device: str = "cpu") -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return (logits surrounded by NaN, biases by name)."""
    generator = torch.Generator().manual_seed(case.seed)
    biases = draw_biases(case, generator)
    logits = _draw(case, case.tokens, generator)
    while len(close := (~apart(case, logits, biases)).nonzero()[:, 0]):
        logits[close] = _draw(case, len(close), generator)
    if case.hostile:
        _add_specials(logits)
    before, beside = (8, 16) if case.aligned else (3, 5)
    wide = torch.full((case.tokens, case.experts + beside), math.nan, dtype=logits.dtype)
    wide[:, before : before + case.experts] = logits
    wide = wide.to(device)
    biases = {name: bias.to(device) for name, bias in biases.items()}
    return wide[:, before : before + case.experts], biases


def draw_biases(case: Routing, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random biases by name, as arguments of `route`."""
    biases = {}
    if case.bias:
        biases["bias"] = torch.rand(case.experts, generator=generator) / 4
    if case.logit_bias:
        steps = torch.randint(-64, 65, (case.experts,), generator=generator)
        biases["logit_bias"] = steps * STEP
    return biases


def check_route(case: Routing, arch: str | None = None, device: str = "cpu") -> None:
    """Check ids exactly, weights within the calibrated tolerance, shared experts exactly."""
    logits, biases = build(case, device)
    options = case.options() | biases
    with checked():
        ids, weights = route(logits, case.top_k, arch=arch, **options)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    # Rounding errors are measured over more tokens: a single one may be exact by chance.
    more = _draw(case, CALIBRATING, torch.Generator().manual_seed(case.seed)).to(device)
    logits = torch.cat((logits, more))
    chosen, fixed = reference.route(logits, case.top_k, **options)
    assert torch.equal(ids, chosen[: case.tokens]), "ids"
    assert torch.equal(weights[:, case.top_k :], fixed[: case.tokens, case.top_k :])
    chosen, weights = chosen[:, : case.top_k], weights[:, : case.top_k]
    logits = _biased(logits, biases)
    exact, rounded = (
        reference.weights_of(scores, chosen, case.renormalize) * case.scale
        for scores in (
            reference.scores(logits.double(), case.scoring),
            reference.scores(logits, case.scoring, rounded_exp),
        )
    )
    weights = torch.cat((weights, rounded[case.tokens :]))
    report = compare_output(weights, exact, rounded, torch.float32)
    assert report.ok, str(report)


def _biased(logits: torch.Tensor, biases: dict[str, torch.Tensor]) -> torch.Tensor:
    """Add the bias of the router's linear layer, in fp32."""
    return logits.float() + biases.get("logit_bias", 0.0)


def check_permutation(
    ids: torch.Tensor,
    experts: int,
    arch: str | None = None,
    options: Options = CHECKED,
    expert_range: tuple[int, int] | None = None,
) -> None:
    """Compare all three tensors exactly, up to the number of rows."""
    with checked(options):
        got = permutation(ids, experts, expert_range=expert_range, arch=arch)
    expected = reference.permutation(ids, experts, expert_range=expert_range)
    for name in ("offsets", "slot_of_row", "row_of_slot"):
        mine, wanted = getattr(got, name), getattr(expected, name)
        assert (mine.dtype, mine.shape) == (torch.int32, wanted.shape)
        if name == "slot_of_row":
            mine = torch.where(wanted < 0, wanted, mine)
        assert torch.equal(mine, wanted), name


@dataclass(frozen=True)
class Sum:
    """A call of `combine`."""

    tokens: int
    top_k: int
    hidden: int
    dtype: str = "bf16"
    out_dtype: str = "bf16"
    weighted: bool = True
    seed: int = 0

    def __str__(self) -> str:
        flags = "-plain" * (not self.weighted)
        return f"{self.tokens}x{self.hidden}-k{self.top_k}-{self.dtype}-{self.out_dtype}{flags}"

    def inputs(self, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (y surrounded by NaN, with an unused row; weights surrounded by NaN;
        row_of_slot)."""
        generator = torch.Generator(device).manual_seed(self.seed)
        rows = self.tokens * self.top_k + 1
        y = torch.randn(rows, self.hidden, generator=generator, device=device)
        wide = torch.full((rows, self.hidden + 16), math.nan, device=device)
        wide[1:, 8:-8] = y[1:]
        weights = torch.full((self.tokens, self.top_k + 1), math.nan, device=device)
        weights[:, :-1].uniform_(generator=generator)
        order = torch.randperm(rows - 1, generator=generator, device=device).int() + 1
        return wide.to(DTYPES[self.dtype])[:, 8:-8], weights[:, :-1], order


def check_combine(case: Sum, arch: str | None = None, device: str = "cpu") -> None:
    """Compare bit for bit: fused multiply-adds in order, then one rounding."""
    y, weights, row_of_slot = case.inputs(device)
    if not case.weighted:
        weights, row_of_slot = None, row_of_slot.view(case.tokens, case.top_k)
    with checked():
        got = combine(y, weights, row_of_slot, out_dtype=DTYPES[case.out_dtype], arch=arch)
    expected = one_by_one(y, weights, row_of_slot.view(case.tokens, case.top_k))
    assert torch.equal(got, expected.to(DTYPES[case.out_dtype]))


def one_by_one(
    y: torch.Tensor, weights: torch.Tensor | None, row_of_slot: torch.Tensor
) -> torch.Tensor:
    """fp32 sums in the order of choices; a product of two fp32 numbers is exact in fp64."""
    total = torch.zeros(len(row_of_slot), y.shape[1], device=y.device)
    for choice in range(row_of_slot.shape[1]):
        term = y[row_of_slot[:, choice].long()].double()
        if weights is not None:
            term = term * weights[:, choice, None].double()
        total = (total.double() + term).float()
    return total


def _draw(case: Routing, tokens: int, generator: torch.Generator) -> torch.Tensor:
    logits = torch.randn(tokens, case.experts, generator=generator).clamp(-2, 2) * 2
    return ((logits / STEP).round() * STEP).to(DTYPES[case.dtype])


def _add_specials(logits: torch.Tensor) -> None:
    """Replace the first tokens by special ones, as many as there are."""
    specials = (
        lambda row: row.fill_(1.5),
        lambda row: row[::2].fill_(-math.inf),
        lambda row: row[1::2].fill_(math.nan),
        lambda row: row.fill_(-math.inf),
        lambda row: row[-2:].fill_(math.inf),
        lambda row: row.fill_(math.nan),
    )
    for row, special in zip(logits[1:], specials, strict=False):
        special(row)


def apart(case: Routing, logits: torch.Tensor, biases: dict[str, torch.Tensor]) -> torch.Tensor:
    """Whether neither experts nor groups are almost equal where it matters, bool [T]."""
    chosen_by = reference.scores(_biased(logits, biases).double(), case.scoring)
    chosen_by = chosen_by + biases.get("bias", torch.zeros(1)).double()
    if case.groups == (1, 1):
        return _distinct(chosen_by.topk(min(case.top_k + 1, case.experts), dim=-1).values)
    groups = chosen_by.unflatten(-1, (case.groups[0], -1))
    best = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
    return _distinct(chosen_by) & _distinct(best)


def _distinct(values: torch.Tensor) -> torch.Tensor:
    """Whether no two values of a row are almost equal, bool [T]."""
    falling = values.sort(dim=-1, descending=True).values
    high, low = falling[:, :-1], falling[:, 1:]
    return ((high == low) | (high - low > GAP * high.abs())).all(-1)


def rounded_exp(x: torch.Tensor) -> torch.Tensor:
    """exp as rounded by the kernel: a power of two of a rounded exponent, accurate to EXP2_BITS."""
    mantissa, binary = torch.frexp(torch.exp2(x * math.log2(math.e)))
    return torch.ldexp((mantissa * 2**EXP2_BITS).round() / 2**EXP2_BITS, binary)


# ---- Inputs for the router with its linear layer, and their expected results
#
# If sums are exact in fp32 in any order, logits are, too, and experts are compared exactly: tokens
# in which two are almost equal are drawn again (`routing_cases`). For other numbers a logit may be
# rounded to either side of its exact value, within the error of a sum; every choice that follows
# from logits within that range is right.

INF, NAN = math.inf, math.nan


@dataclass(frozen=True)
class Linear:
    """A call of `route_tokens`.

    route: its logits and number of tokens; the dtype is that of x.
    hostile: the tokens from the second on have NaN or infinities, as far as there are any.
    """

    route: Routing
    hidden: int
    bias: bool = False
    ready: bool = True
    hostile: bool = False

    def __str__(self) -> str:
        flags = "-linear" * self.bias + "-late" * (not self.ready) + "-hostile" * self.hostile
        return f"h{self.hidden}-{self.route}{flags}"

    def router(self, device: str = "cpu") -> Router:
        """Return the router with its biases."""
        case, draw = self.route, torch.Generator().manual_seed(self.route.seed + 1)
        biases = {name: bias.to(device) for name, bias in draw_biases(case, draw).items()}
        return Router(case.top_k, **case.options(), **biases)

    def exact(self, tokens: int, device: str = "cpu") -> tuple[torch.Tensor, RouterLinear]:
        """Return (x [tokens, H], the layer): small multiples of powers of two, with sums exact in
        fp32."""
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
        """Like `exact`, with normal numbers."""
        draw = torch.Generator().manual_seed(self.route.seed)
        layer = self._layer(lambda *shape: torch.randn(shape, generator=draw))
        x = torch.randn(tokens, self.hidden, generator=draw).to(DTYPES[self.route.dtype])
        return self._placed(x, device), self._on(layer, device)

    def _layer(self, draw) -> RouterLinear:
        """The deviation of logits is about one. Scaling by a power of two keeps the numbers
        exact."""
        dtype, experts = DTYPES[self.route.dtype], self.route.experts
        scale = 2.0 ** -round(math.log2(self.hidden) / 2 - 1)
        weight = (draw(experts, self.hidden) * scale).to(dtype)
        return RouterLinear(weight, draw(experts).to(dtype) if self.bias else None, self.ready)

    def _apart(self, x: torch.Tensor, layer: RouterLinear, router: Router) -> torch.Tensor:
        biases = {name: getattr(router, name) for name in ("bias", "logit_bias")}
        given = {name: bias for name, bias in biases.items() if bias is not None}
        return apart(self.route, logits_of(x, layer).to(x.dtype), given)

    def _placed(self, x: torch.Tensor, device: str) -> torch.Tensor:
        """Put x into a tensor of NaN."""
        if self.hostile:
            _add_special_numbers(x)
        wide = torch.full((len(x) + 1, self.hidden + 16), NAN, dtype=x.dtype)
        wide[:-1, 8:-8] = x
        return wide.to(device)[:-1, 8:-8]

    def _on(self, layer: RouterLinear, device: str) -> RouterLinear:
        """Put the layer's weight into a tensor of NaN."""
        wide = torch.full((len(layer.weight) + 1, self.hidden + 8), NAN, dtype=layer.weight.dtype)
        wide[:-1, :-8] = layer.weight
        bias = None if layer.bias is None else layer.bias.to(device)
        return replace(layer, weight=wide.to(device)[:-1, :-8], bias=bias)


def logits_of(x: torch.Tensor, layer: RouterLinear) -> torch.Tensor:
    """[T, E], fp64."""
    logits = x.double() @ layer.weight.double().T
    return logits if layer.bias is None else logits + layer.bias.double()


def check_exact(case: Linear, arch: str | None = None, device: str = "cpu") -> None:
    """Check ids exactly, weights within the calibrated tolerance."""
    x, layer = case.exact(case.route.tokens, device)
    router = case.router(device)
    with checked():
        ids, weights = route_tokens(x, layer, router, arch=arch)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    more, _ = replace(case, hostile=False).exact(CALIBRATING, device)
    logits = logits_of(torch.cat((x, more)), layer).to(x.dtype)
    compare(logits, ids, weights, router)


def check_normal(case: Linear, arch: str | None = None, device: str = "cpu") -> None:
    """Check that ids follow from some logits within the error of a sum.

    If no logit that may be chosen can round to either side, as nearly everywhere, ids are exact,
    and weights are within the calibrated tolerance. The choice depends on logits alone, and weights
    are those of the chosen ones.
    """
    top_k = case.route.top_k
    assert case.route == Routing(case.route.tokens, case.route.experts, top_k, case.route.dtype)
    x, layer = case.normal(case.route.tokens, device)
    router = case.router(device)
    with checked():
        ids, weights = route_tokens(x, layer, router, arch=arch)
    low, high = bounds(logits_of(x, layer), x, layer)
    least = low.float().topk(top_k, dim=1).values[:, -1:]  # of the chosen logits
    assert (high.float().gather(1, ids.long()) >= least).all()
    sure = ((low == high) | (high < least)).all(1)
    assert sure.float().mean() >= 0.5, "hardly a token has logits that can be known"
    more, _ = case.normal(CALIBRATING, device)
    logits = torch.cat((low[sure], logits_of(more, layer).to(x.dtype)))
    compare(logits, ids[sure], weights[sure], router)


def bounds(
    exact: torch.Tensor, x: torch.Tensor, layer: RouterLinear
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and largest rounded logits: twice the error of torch's sums in fp32, plus an
    ulp."""
    bias = 0.0 if layer.bias is None else layer.bias.float()
    in_fp32 = (x.float() @ layer.weight.float().T + bias).double()
    error = REFERENCE_FACTOR * (in_fp32 - exact).abs().max()
    error = error + ulp(exact.abs().amax(1, keepdim=True), torch.float32)
    return (exact - error).to(x.dtype), (exact + error).to(x.dtype)


def compare(logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, router: Router) -> None:
    """Compare with the routing of rounded logits; the logits after the tokens calibrate the
    tolerance."""
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


def _add_special_numbers(x: torch.Tensor) -> None:
    """Put special numbers into the tokens after the first, as many as there are."""
    for row, value in zip(x[1:], (NAN, INF, -INF), strict=False):
        row[len(row) // 3] = value
