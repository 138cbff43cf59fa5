"""Problems of the steps beside attention, decode and the grouped GEMM: one call on some rows.

A problem draws arguments; its peers take them and return tensors: our kernel first, then torch as a
model would write it. Bytes are those of arguments and results, each once: what a step reads twice,
or for every copy of a row, is its own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from lab.measure.timing import rotation

# family -> module beside this one whose `makers(hidden)` gives, by step, what makes a problem of so
# many rows
MODULES = {"moe": "moe_steps", "kvcache": "kvcache", "dsv4": "dsv4", "merge": "merge"}

Arguments = tuple[Any, ...]
Outputs = tuple[torch.Tensor, ...]
Maker = Callable[[int], "Problem"]


@dataclass(frozen=True)
class Problem:
    """A step for so many rows.

    draw(seed, device) makes arguments; peers take them, the first of them is ours;
    check(arguments, outputs) raises ValueError where these outputs of ours are wrong. beside: what
    is torch's in ours.
    """

    step: str
    name: str
    tokens: int
    nbytes: int
    draw: Callable[[int, str], Arguments]
    peers: dict[str, Callable[..., Any]]
    check: Callable[[Arguments, Any], None]
    beside: str = ""

    @property
    def ours(self) -> str:
        """Name of our peer."""
        return next(iter(self.peers))

    @property
    def sizes(self) -> dict[str, Any]:
        """What a row says of it."""
        return {name: getattr(self, name) for name in ("step", "name", "tokens", "nbytes")}

    def sets(self, cache_bytes: int) -> int:
        """Buffer sets of a rotation after which nothing of the first is left in the cache."""
        return rotation(self.nbytes, cache_bytes)

    def __str__(self) -> str:
        return f"{self.step}: {self.name}, {self.tokens} row{'s' * (self.tokens != 1)}"


def problems_of(
    family: str, steps: Sequence[str], rows: Sequence[int], hidden: int, names: Sequence[str] = ()
) -> list[Problem]:
    """Every variant of the steps for every number of rows, or those whose name has one of the words
    in `names`. ValueError for what there is not."""
    module = import_module(f"lab.cases.{MODULES[family]}")
    makers, most = module.makers(hidden), getattr(module, "MOST_BYTES", None)
    every = [make(count) for step in steps for make in makers[step] for count in rows]
    found = [p for p in every if most is None or p.nbytes <= most]
    if not found:
        least = min(p.nbytes for p in every)
        raise ValueError(f"{', '.join(steps)}, --rows {min(rows)}: {least} bytes, limit {most}")
    found = [p for p in found if not names or any(name in p.name for name in names)]
    if not found:
        raise ValueError(f"no problem of {', '.join(steps)} has one of {[*names]} in its name")
    return found


def normal(seed: int, device: str, *shape: int) -> torch.Tensor:
    """Standard normal numbers, bf16."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).bfloat16()


def expect_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    """ValueError unless every byte of what is expected is there, at the beginning of `got`."""
    mine, theirs = (x.contiguous().view(torch.uint8).flatten() for x in (got, expected))
    if not torch.equal(mine[: theirs.numel()], theirs):
        raise ValueError("wrong: other bytes than the reference's")


def expect_bits(outputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """The same of several."""
    for pair in zip(outputs, expected, strict=False):
        expect_equal(*pair)


def expect_close(got: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    """ValueError unless the largest difference, over the largest number, is within the limit."""
    error = ((got - expected).abs().max() / expected.abs().max()).item()
    if not error <= limit:
        raise ValueError(f"wrong: {error:.1e} off the reference, limit {limit:.1e}")
