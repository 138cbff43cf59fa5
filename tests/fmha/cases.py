"""Attention problems for the tests, their hostile inputs, and how a result is judged."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fmha import attention, reference
from fmha.reference import Attention
from kernelkit import tolerance
from kernelkit.launch import emulation
from ptxemu import Options

POLICIES = ("round-robin", "random", "adversarial")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_DIM = 64
PAST_ROWS, PAST_COLUMNS = 5, 64  # NaN around every input, inside the same allocation


@dataclass(frozen=True)
class Case:
    """q [batch, sq, q_heads, 64]; k, v [batch, skv, kv_heads, 64].

    kv_lens: valid keys per batch entry; everything past them is NaN. amplitude: of q, large values
    move the row maximum from tile to tile. normalize False: the raw output is normalised here.
    """

    sq: int
    skv: int
    heads: tuple[int, int] = (1, 1)
    batch: int = 1
    dtype: str = "bf16"
    causal: bool = False
    kv_lens: tuple[int, ...] | None = None
    amplitude: float = 1.0
    normalize: bool = True

    def __str__(self) -> str:
        parts = [self.dtype, "causal" if self.causal else "full", f"{self.sq}x{self.skv}"]
        parts += [f"h{self.heads[0]}.{self.heads[1]}", f"b{self.batch}"]
        parts += ["lens"] * (self.kv_lens is not None) + ["raw"] * (not self.normalize)
        return "-".join(parts + [f"amp{self.amplitude:g}"] * (self.amplitude != 1.0))

    @property
    def group(self) -> str:
        """Cases of one group share a compiled kernel."""
        return f"{self.dtype}-{self.causal}-{self.normalize}-{self.kv_lens is not None}"

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views into larger allocations full of NaN, heads before tokens in memory."""
        generator = torch.Generator().manual_seed(hash_free_seed(self))
        q = _view(self.batch, self.sq, self.heads[0], DTYPES[self.dtype])
        k, v = (_view(self.batch, self.skv, self.heads[1], DTYPES[self.dtype]) for _ in range(2))
        for tensor, amplitude in ((q, self.amplitude), (k, 1.0), (v, 1.0)):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * amplitude)
        for entry, length in enumerate(self.kv_lens or ()):
            k[entry, length:] = math.nan
            v[entry, length:] = math.nan
        return q, k, v


def hash_free_seed(case: Case) -> int:
    """A seed that does not depend on PYTHONHASHSEED."""
    return case.sq * 1009 + case.skv * 31 + case.batch


def _view(batch: int, tokens: int, heads: int, dtype: torch.dtype) -> torch.Tensor:
    memory = torch.full(
        (batch, heads, tokens + PAST_ROWS, HEAD_DIM + PAST_COLUMNS), math.nan, dtype=dtype
    )
    return memory[:, :, :tokens, PAST_COLUMNS:].transpose(1, 2)


SHAPES = (
    (1, 1), (1, 128), (127, 129), (128, 128), (200, 64), (200, 333), (256, 512), (0, 5), (5, 0),
)  # fmt: skip
HEADS = ((1, 1), (4, 2), (8, 1))

MATRIX = tuple(
    Case(*shape, heads, batch, dtype, causal)
    for dtype, causal, shape, heads, batch in itertools.product(
        DTYPES, (False, True), SHAPES, HEADS, (1, 2)
    )
)

# One of each kind: every shape, every head ratio, both dtypes and masks, and what MATRIX has not.
QUICK = (
    *(Case(*shape, causal=causal) for shape, causal in itertools.product(SHAPES, (False, True))),
    Case(127, 129, (4, 2), 2, "fp16", causal=True),
    Case(130, 70, (8, 1), 2, "fp16"),
    Case(200, 700, amplitude=4.0),
    Case(130, 640, causal=True, dtype="fp16", amplitude=4.0),
    Case(130, 400, (2, 1), 3, kv_lens=(256, 129, 0)),
    Case(130, 400, (2, 1), 3, causal=True, kv_lens=(400, 70, 1), normalize=False),
)


def run(case: Case, policy: str, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """(O, LSE), or (O_raw, LSE, row_max), of the kernel in the emulator."""
    lens = None if case.kv_lens is None else torch.tensor(case.kv_lens, dtype=torch.int32)
    with emulation(Options(policy=policy, seed=seed)) as active:
        results = attention(
            *case.inputs(),
            causal=case.causal,
            normalize=case.normalize,
            return_lse=True,
            kv_lens=lens,
        )
    assert not any(launch.findings for report in active.reports for launch in report.launches)
    return results


def references(case: Case) -> tuple[Attention, Attention]:
    """(fp64 definition, the same with the kernel's rounding points)."""
    inputs, options = case.inputs(), {"causal": case.causal, "kv_lens": case.kv_lens}
    return reference.definition(*inputs, **options), reference.rounded(*inputs, **options)


def judge(case: Case, results: Sequence[torch.Tensor]) -> list[tolerance.Report]:
    """Verdicts on O and LSE, and on the identity that connects a raw output with them."""
    exact, rounded = references(case)
    o, lse = results[:2]
    if not case.normalize:
        o = normalised(*results)
    return [
        tolerance.compare_output(o, exact.o, rounded.o, DTYPES[case.dtype]),
        tolerance.compare_lse(lse, exact.lse, rounded.lse),
    ]


def normalised(raw: torch.Tensor, lse: torch.Tensor, row_max: torch.Tensor) -> torch.Tensor:
    """O = O_raw / exp(LSE - row_max); rows without keys stay as they are."""
    total = torch.exp(lse - row_max).nan_to_num(nan=1.0)  # (-inf) - (-inf) where no key was seen
    return raw / total.transpose(1, 2)[..., None]


def same_bits(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    """Bit equality, NaNs and signed zeros included."""
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(first, second, strict=True)
    )
