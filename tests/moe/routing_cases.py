"""Inputs for the routing kernels that are hostile by default, and what must come out of them.

Ids are compared exactly, so that scores which an expert is chosen by are apart or equal: tokens
where two of them are closer than GAP, without being equal, are drawn again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from kernelkit.numerics.tolerance import compare_output
from lab.problems.grouped_gemm import CHECKED, checked
from moe import reference_routing as reference
from moe.routing import combine, permutation, route
from ptxemu import Options
from tests.kernelkit.merge_cases import EXP2_BITS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STEP = 2.0**-6  # logits are multiples of it, so that many are equal and none almost
CALIBRATING = 64  # tokens
GAP = 1e-5  # between what is chosen by, relative


@dataclass(frozen=True)
class Case:
    """A call of `route`; hostile: the first tokens have NaN, infinities, or equal logits; aligned:
    rows of logits begin at multiples of 16 bytes."""

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
    """run() in the emulator, where the checker finds nothing."""
    with checked():
        return run()


def build(case: Case, device: str = "cpu") -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(logits amid NaN, biases by name)."""
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


def draw_biases(case: Case, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """By name, as `route` takes them."""
    biases = {}
    if case.bias:
        biases["bias"] = torch.rand(case.experts, generator=generator) / 4
    if case.logit_bias:
        steps = torch.randint(-64, 65, (case.experts,), generator=generator)
        biases["logit_bias"] = steps * STEP
    return biases


def check_route(case: Case, arch: str | None = None, device: str = "cpu") -> None:
    """Ids exactly, weights within the calibrated tolerance; shared experts exactly."""
    logits, biases = build(case, device)
    options = case.options() | biases
    with checked():
        ids, weights = route(logits, case.top_k, arch=arch, **options)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    # Rounding errors are measured on more tokens: a single one may be exact by chance.
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
    """fp32, with the bias of the router's linear layer."""
    return logits.float() + biases.get("logit_bias", 0.0)


def check_permutation(
    ids: torch.Tensor,
    experts: int,
    arch: str | None = None,
    options: Options = CHECKED,
    expert_range: tuple[int, int] | None = None,
) -> None:
    """All three tensors exactly, as far as there are rows."""
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
        """(y amid NaN, with a row that nobody asks for; weights amid NaN; row_of_slot)."""
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
    """Bit for bit: one fused multiplication and addition after the other, then one rounding."""
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


def _draw(case: Case, tokens: int, generator: torch.Generator) -> torch.Tensor:
    logits = torch.randn(tokens, case.experts, generator=generator).clamp(-2, 2) * 2
    return ((logits / STEP).round() * STEP).to(DTYPES[case.dtype])


def _add_specials(logits: torch.Tensor) -> None:
    """To the first tokens, as many as there are."""
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


def apart(case: Case, logits: torch.Tensor, biases: dict[str, torch.Tensor]) -> torch.Tensor:
    """bool [T]: neither experts nor groups are almost equal, as far as it matters."""
    chosen_by = reference.scores(_biased(logits, biases).double(), case.scoring)
    chosen_by = chosen_by + biases.get("bias", torch.zeros(1)).double()
    if case.groups == (1, 1):
        return _distinct(chosen_by.topk(min(case.top_k + 1, case.experts), dim=-1).values)
    groups = chosen_by.unflatten(-1, (case.groups[0], -1))
    best = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
    return _distinct(chosen_by) & _distinct(best)


def _distinct(values: torch.Tensor) -> torch.Tensor:
    """bool [T]: no two values of a row are almost equal."""
    falling = values.sort(dim=-1, descending=True).values
    high, low = falling[:, :-1], falling[:, 1:]
    return ((high == low) | (high - low > GAP * high.abs())).all(-1)


def rounded_exp(x: torch.Tensor) -> torch.Tensor:
    """As the kernel rounds: a power of two of a rounded exponent, good to EXP2_BITS."""
    mantissa, binary = torch.frexp(torch.exp2(x * math.log2(math.e)))
    return torch.ldexp((mantissa * 2**EXP2_BITS).round() / 2**EXP2_BITS, binary)
