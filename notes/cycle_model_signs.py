"""Changes of FlashAttention-4 whose effect others measured, and what the cycle model says of them.

    PYTHONPATH=.:scripts python notes/cycle_model_signs.py --source CHECKOUT --keep FOLDER

CHECKOUT is one of flash-attention. Each variant is a copy of its source with words replaced, run in
a process of its own with the compiler of this environment; what lies in FOLDER is not computed
again. It prints how many times as fast each change makes the kernel, beside what was published, and
the range over sets of parameters, the same ones for both variants.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cycle_model import gpus
from cycle_model.parameters.parameter import Gpu
from lab.cycles import peers
from lab.cycles.peers import Shape
from lab.cycles.published import timed_of
from lab.tools.tables import show, table

CLUSTERS, PERTURBED = 32, 8
SHAPES = {
    f"hd{width}{kind}": Shape(width, bool(kind), 8, 4096, 2048 // width, 2048 // width)
    for width, kind in itertools.product((64, 128), ("", " causal"))
}


class Change(NamedTuple):
    """Words of a file of `flash_attn/cute`."""

    file: str
    old: str
    new: str


def tuned(every: int, softmax: int, correction: int) -> Change:
    """The line of pairs at 128 columns: an exponential in `every` emulated, and registers."""
    line = '"ex2_emu_freq": {}, "ex2_emu_start_frg": 1, "num_regs_softmax": {}, '
    line += '"num_regs_correction": {}'
    return Change(KERNEL, line.format(10, 176, 88), line.format(every, softmax, correction))


KERNEL, INTERFACE = "flash_fwd_sm100.py", "interface.py"
PUBLISHED = "sm_stats_barrier.arrive_w_index(index=stage * 4 + warp_idx)\n\n        # if"
CHANGES = {
    "one CTA": Change(INTERFACE, "and not requested_disable_2cta", "and False"),
    "LSE": Change(INTERFACE, "return_lse: bool = False", "return_lse: bool = True"),
    "direct": Change(KERNEL, "self.use_tma_O = (\n", "self.use_tma_O = (False and\n"),
    "eager": Change(KERNEL, "8.0 if const_expr(self.q_dtype", "0.0 if const_expr(self.q_dtype"),
    "fenced": Change(
        KERNEL, PUBLISHED, PUBLISHED.replace("\n\n", "\n        cute.arch.sync_warp()\n")
    ),
    "184/80": tuned(10, 184, 80),
    "1 in 16": tuned(16, 176, 88),
    "none": tuned(0, 176, 88),
    "1 in 10": Change(KERNEL, 'get("ex2_emu_freq", 16)', 'get("ex2_emu_freq", 10)'),
    "no emulation": Change(KERNEL, "(self.head_dim_padded <= 128 or", "(False or"),
}


@dataclass(frozen=True)
class Fact:
    """published: how many times as fast `after` is as `before`; 0 where nobody says. Of both: the
    shape, what is changed, and the GPU where it is no B200."""

    source: str
    published: float
    before: str
    after: str


FACTS = (
    Fact("PR 2869", 4.344 / 3.433, "hd128", "hd128, 184/80"),
    Fact("PR 2461", 1542 / 1280, "hd128", "hd128, one CTA"),
    Fact("PR 2741", 1.205, "hd128", "hd128, one CTA"),
    Fact("PR 2741", 1.204, "hd64", "hd64, direct"),
    Fact("PR 2741", 0.993, "hd64 causal", "hd64 causal, direct"),
    Fact("issue 2729", 3.0018 / 2.5281, "hd64", "hd64, LSE"),
    Fact("PR 2605", 713 / 749, "hd64", "hd64 causal"),
    Fact("PR 2605", 1090 / 1328, "hd128", "hd128 causal"),
    Fact("PR 2605", 1213 / 749, "hd64", "hd64 on GB300"),
    Fact("PR 2605", 1796 / 1328, "hd128", "hd128 on GB300"),
    Fact("PR 2869", 1, "hd128", "hd128, fenced"),
    Fact("", 0, "hd64", "hd64, fenced"),
    Fact("", 0, "hd128, none", "hd128"),
    Fact("PR 2316", 1.03, "hd128, 1 in 16", "hd128"),
    Fact("", 0, "hd64, no emulation", "hd64, 1 in 10"),
    Fact("", 0, "hd128, eager", "hd128"),
)
COLUMNS = (
    *(("source", "{source}"), ("from", "{before}"), ("to", "{after}")),
    ("published", lambda row: f"x {row['published']:.2f}" if row["published"] else ""),
    *(("modelled", "x {modelled:.2f}"), ("range", "{low:.2f} .. {high:.2f}")),
)
_NAME = re.compile(r"(hd\d+(?: causal)?)(?:, (.+?))?(?: on (\w+))?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--only", default="", help="facts whose variants have this in their names")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(times_of(options.child, options.source)))
        return
    rows = []
    for fact in FACTS:
        if options.only in f"{fact.before} {fact.after}":
            before, after = (speeds_of(name, options) for name in (fact.before, fact.after))
            ratios = [new / old for old, new in zip(before, after, strict=True)]
            found = {"modelled": ratios[0], "low": min(ratios), "high": max(ratios)}
            rows.append(vars(fact) | found)
    show(*table("how many times as fast", COLUMNS, rows))


def speeds_of(name: str, options: argparse.Namespace) -> list[float]:
    """TFLOP/s of a variant, from the folder or from a process of its own."""
    file = options.keep / f"{name}.json".replace("/", "_")
    if not file.exists():
        with tempfile.TemporaryDirectory() as folder:
            copied(options.source, Path(folder), variant(name)[1])
            words = ["--child", name, "--source", folder, "--keep", folder]
            command = [sys.executable, "-W", "ignore", __file__, *words]
            done = subprocess.run(command, check=False, stdout=subprocess.PIPE)
        file.write_bytes(done.stdout.splitlines()[-1])  # the DSL may fail when Python ends
    flops = variant(name)[0].flops
    return [flops / us * 1e-6 for us in json.loads(file.read_text())]


def variant(name: str) -> tuple[Shape, Change | None, Gpu]:
    """ValueError for a name that is none."""
    found = _NAME.fullmatch(name)
    if not found:
        raise ValueError(f"{name!r}: SHAPE[, CHANGE][ on GPU]")
    change = CHANGES[found[2]] if found[2] else None
    return SHAPES[found[1]], change, gpus.named(found[3] or "B200")


def copied(source: Path, folder: Path, change: Change | None) -> None:
    """ValueError for words that the source does not have."""
    target = folder / "flash_attn" / "cute"
    shutil.copytree(source / "flash_attn" / "cute", target)
    if change:
        text = (target / change.file).read_text()
        if change.old not in text:
            raise ValueError(f"{change.file}: no {change.old!r}")
        (target / change.file).write_text(text.replace(change.old, change.new))


def times_of(name: str, source: Path) -> list[float]:
    """Microseconds with the parameters as they are, and with sets of others."""
    shape, _, gpu = variant(name)
    peers.from_source(source)
    with peers.flash_attention(gpu) as function:
        timed = timed_of(function, shape, gpu, CLUSTERS)
    return [timed.microseconds(each) for each in (gpu, *map(gpu.perturbed, range(PERTURBED)))]


if __name__ == "__main__":
    main()
