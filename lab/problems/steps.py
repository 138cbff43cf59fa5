"""Problems of the steps beside attention, decode and the grouped GEMM: one call on some rows.

A problem draws arguments; its peers take them and return tensors: our kernel first, then torch as a
model would write it. Bytes are those of arguments and results, each once: what a step reads twice,
or for every copy of a row, is its own affair.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch

from kernelkit.call.launch import emulation
from kernelkit.compile.compiler import collecting
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.plan_names import plan_of
from kernelkit.merge.api import merge
from lab.flags.steps import NATIVE_ONLY
from lab.measure.timing import rotation
from lab.problems import family
from lab.problems.family import Family
from lab.problems.sections import lines_of, parts_of
from lab.sass.kernel import Subject, subject_of
from lab.tools.common import describe
from lab.tools.groups import ARCHS
from lab.tools.place import Place
from lab.tools.tables import show, table

# family -> module beside this one whose `makers(hidden)` gives, by step, what makes a problem of so
# many rows
MODULES = {"moe": "moe_steps", "kvcache": "kvcache", "dsv4": "dsv4", "merge": "steps"}

Arguments = tuple[Any, ...]
Outputs = tuple[torch.Tensor, ...]
Maker = Callable[[int], "Problem"]
COLUMNS = (
    ("problem", "{name}"), ("rows", "{tokens:,}"), ("bytes", "{nbytes:,}"), ("run as", "{backend}"),
    ("launches", "{launches}"), ("warp-instr.", "{instructions:,}"), ("seconds", "{seconds:.1f}"),
    ("", lambda row: row["wrong"] or "ok"),
)  # fmt: skip


@dataclass(frozen=True)
class Problem(family.Problem):
    """A step for so many rows.

    draw(seed, device) makes arguments; peers take them, the first of them is ours;
    check(arguments, outputs) raises ValueError where these outputs of ours are wrong. beside: what
    is torch's in ours.
    """

    step: str
    name: str
    tokens: int
    nbytes: int
    draw: Callable[[int, str], Arguments] = field()  # a field in the place of the method
    peers: dict[str, Callable[..., Any]]
    check: Callable[[Arguments, Any], None]
    beside: str = ""

    @property
    def ours(self) -> str:
        """Name of our peer."""
        return next(iter(self.peers))

    @property
    def sizes(self) -> dict[str, Any]:
        """Fields of the problem in a row."""
        return {name: getattr(self, name) for name in ("step", "name", "tokens", "nbytes")}

    def sets(self, cache_bytes: int) -> int:
        """Buffer sets of a rotation after which nothing of the first is left in the cache."""
        return rotation(self.nbytes, cache_bytes)

    def __str__(self) -> str:
        return f"{self.step}: {self.name}, {self.tokens} row{'s' * (self.tokens != 1)}"

    def calls(self, drawn: Arguments, place: Place) -> dict[str, Callable[[], Any]]:
        return {"": partial(self.peers[self.ours], *drawn)}

    def judge(self, drawn: Arguments, name: str, results: Any, slack: float) -> dict[str, Any]:
        self.check(drawn, results)
        return {"wrong": ""}

    def keys(self, arch: str) -> list[KernelKey]:
        """Keys of all kernels, as if they were compiled for that architecture; '' for their own."""
        arguments = self.draw(0, "cpu")
        with collecting() as keys, emulation(arch=arch or None):
            self.peers[self.ours](*arguments)
        return [*dict.fromkeys(KernelKey(k.source, k.config, arch or k.arch) for k in keys)]

    def plan(self, arch: str) -> Iterator[str]:
        """The kernels, their configs, and plans if any."""
        yield f"{self}, {self.nbytes:,} bytes"
        for key in self.keys(arch):
            yield f"  {key.source} for {key.arch}: {describe(key.config)}"
            if found := plan_of(key):
                yield from lines_of(parts_of(*found))

    def kernels(self, arch: str) -> Iterator[Subject]:
        return map(subject_of, self.keys(arch))


def problems_of(
    family: str, steps: Sequence[str], rows: Sequence[int], hidden: int, names: Sequence[str] = ()
) -> list[Problem]:
    """Every variant of the steps for every number of rows, or those whose name has one of the words
    in `names`. ValueError for what there is not."""
    module = import_module(f"lab.problems.{MODULES[family]}")
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
    """Expect equal bits of several outputs."""
    for pair in zip(outputs, expected, strict=False):
        expect_equal(*pair)


def expect_close(got: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    """ValueError unless the largest difference, over the largest number, is within the limit."""
    error = ((got - expected).abs().max() / expected.abs().max()).item()
    if not error <= limit:
        raise ValueError(f"wrong: {error:.1e} off the reference, limit {limit:.1e}")


# -- the merge of attention results, whose parts are a list or one stacked tensor -----------------

HEADS = 32
HEAD_DIMS, PARTS, FORMS = (64, 128, 512), (2, 4, 8), ("list", "stack")
LIMIT = 0.01  # O is rounded to bf16


def makers(hidden: int) -> dict[str, list[Maker]]:
    """Return the makers by step."""
    kinds = itertools.product(HEAD_DIMS, PARTS, FORMS)
    return {"merge": [partial(_merge, *kind) for kind in kinds]}


def _merge(head_dim: int, parts: int, form: str, rows: int) -> Problem:
    """Counted are the bytes of the parts' O, read, and of the merged O, written."""
    heads = math.gcd(rows, HEADS)
    shape = (parts, 1, rows // heads, heads, head_dim)

    def draw(seed: int, device: str) -> Arguments:
        lse = normal(seed + 1, device, parts, 1, heads, rows // heads).float()
        stack = normal(seed, device, *shape), lse
        return (stack if form == "stack" else list(zip(*stack, strict=True)),)

    def check(arguments: Arguments, outputs: Outputs) -> None:
        """Against a softmax over the parts in fp32."""
        (given,) = arguments
        o, lse = given if form == "stack" else map(torch.stack, zip(*given, strict=True))
        weights = lse.softmax(dim=0).transpose(-1, -2)[..., None]
        expect_close(outputs[0].float(), (weights * o).sum(dim=0), LIMIT)
        expect_close(outputs[1], lse.logsumexp(dim=0), LIMIT)

    name = f"{parts} parts of head_dim {head_dim}, {form}"
    nbytes = (parts + 1) * rows * head_dim * torch.bfloat16.itemsize
    return Problem("merge", name, rows, nbytes, draw, {"merge": merge}, check)


# -- the commands ---------------------------------------------------------------------------------


def spelt(options: argparse.Namespace, place: Place) -> list[Problem]:
    """Problems that the flags spell. ValueError for steps that need a GPU where there is none."""
    if place.backend == "emulate" and set(options.steps) & set(NATIVE_ONLY):
        raise ValueError(f"{options.steps[0]} needs a GPU and its bus: {place.reason}")
    return problems_of(options.family, options.steps, options.rows, options.hidden, options.names)


def tell(
    rows: Sequence[dict[str, Any]], options: argparse.Namespace, place: Place
) -> dict[str, Any]:
    """A line for each problem: what it took, and what is wrong where something is."""
    show(*table(options.steps[0], COLUMNS, rows))
    return {"rows": rows}


FAMILY = Family(lambda options: ARCHS, spelt, tell)
