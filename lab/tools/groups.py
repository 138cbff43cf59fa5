"""Flags that commands share, each defined once: sizes, masks, dtypes, where it runs, what is kept.

Every command spells a thing the same way. Older spellings, among them those of CUTLASS's decode
example, are accepted and not listed.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from kernelkit.compile.arch import ARCHITECTURES, BACKENDS, written_for
from ptxemu.host.command_line import output_file
from ptxemu.options import POLICIES

ARCHS = ("sm_100a", "sm_90a")  # what kernels are written for, the first by default
TREES = ("branches", "mask", "block", "chain")  # kinds of words of draft tokens
# masks and scores by functions of positions, of lab.problems.masks
RECIPES = ("document", "alibi", "prefix", "sliding-global", "softcap", "chunks")
ALL_ARCHS = (*dict.fromkeys((*ARCHS, *ARCHITECTURES)),)  # where there are kernels on mma.sync, too
SERVED = (*(arch for arch in ALL_ARCHS if written_for(arch) in ARCHS),)  # run what is for ARCHS
MAX_COUNT = (1 << 31) - 1
THOUSANDS = {"": 1, "k": 2**10, "m": 2**20}
# name -> (older spelling, what it counts)
SIZES = {
    "batch": ("BS", "number of entries in the batch"),
    "q-len": ("qL", "query tokens per entry"),
    "kv-len": ("kvL", "keys per entry: one number for all (8192 or 8k), or a list (100,7,0)"),
    "q-heads": ("qH", "query heads, a multiple of the KV heads"),
    "kv-heads": ("kvH", "KV heads"),
}
PICTURES = (".png", ".svg", ".pdf")
Window = tuple[int | None, int | None]


def add(
    group: argparse._ActionsContainer,
    name: str,
    words: str,
    default: object = None,
    *,
    shown: str = "",
    old: Sequence[str] = (),
    **how: object,
) -> None:
    """`--name` with a value, an integer N unless `how` says otherwise; hidden beside it its older
    spellings. The help is `words`, and what it is by default: `shown`, or as it is."""
    how = {"metavar": None if "choices" in how else "N", **how}
    if "choices" not in how:
        how.setdefault("type", number)
    shown = shown or ("" if default is None else str(default))
    words += f"; default: {shown}" * bool(shown)
    action = group.add_argument(f"--{name}", default=default, help=words, **how)
    hidden = {**how, "dest": action.dest, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for spelling in old:
        group.add_argument(f"--{spelling}", **hidden)


def switch(group: argparse._ActionsContainer, name: str, words: str) -> None:
    """`--name`, without a value."""
    group.add_argument(f"--{name}", action="store_true", help=words)


# -- values ---------------------------------------------------------------------------------------


def number(text: str) -> int:
    """Argument type: an integer, of 32 bits as everything that is counted here."""
    value = int(text)
    if abs(value) > MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text}: must be within +-{MAX_COUNT}")
    return value


def count(text: str) -> int:
    """Argument type: a number from 0 on, '8192', '8k' (8,192) or '1M' (1,048,576)."""
    found = re.fullmatch(r"(\d+)([km]?)", text.strip(), re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a number from 0 on, such as 8192 or 8k"
        )
    return number(str(int(found[1]) * THOUSANDS[found[2].lower()]))


def spelt(number: int) -> str:
    """Format a number as `count` parses it: '8k', or digits."""
    return f"{number // 1024}k" if number and number % 1024 == 0 else str(number)


def positive_count(text: str) -> int:
    """Argument type: such a number from 1 on."""
    if not (value := count(text)):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a number from 1 on, such as 8192 or 8k"
        )
    return value


def lengths(text: str) -> tuple[int, ...]:
    """Argument type: '8k' for all entries or '100,7,0'."""
    try:
        return tuple(count(part) for part in text.split(","))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of key counts: {error}") from None


def window(text: str) -> Window:
    """Argument type: 'L' or 'L,R', nothing for unbounded: '128', '128,0' or ',64'."""
    sides = [part.strip() for part in text.split(",")]
    if len(sides) > 2 or not all(side.isdigit() or not side for side in sides):
        raise argparse.ArgumentTypeError(f"{text!r} is not L or L,R (empty for unbounded: ,64)")
    left, right = (number(side) if side else None for side in (*sides, "")[:2])
    return left, right


def positive(text: str) -> float:
    """Argument type: a number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


# -- an attention problem -------------------------------------------------------------------------


def add_sizes(group: argparse._ArgumentGroup, **defaults: int) -> None:
    """Batch, lengths and heads; defaults by the names of their options."""
    for name, (old, words) in SIZES.items():
        value = defaults[name.replace("-", "_")]
        if name == "kv-len":
            of_each = {"type": lengths, "metavar": "N[,N...]", "shown": str(value)}
            add(group, name, words, (value,), old=[old], **of_each)
        else:
            kind = positive_count if name.endswith("heads") else count
            add(group, name, words, value, old=[old], type=kind)


def add_dtypes(
    group: argparse._ArgumentGroup, io: Collection[str], out: Collection[str], of: str
) -> None:
    """--dtype and --out-dtype; of: what has the first one."""
    add(group, "dtype", f"dtype of {of}", "bf16", choices=io)
    add(group, "out-dtype", "dtype of O", "", shown="as --dtype", choices=out)


def add_visibility(group: argparse._ArgumentGroup, *, causal: bool, recipes: bool = False) -> None:
    """Add flags for what a query sees.

    causal: the default.
    recipes: whether there are functions of positions."""
    words = f"a query sees no key after its own position; default: {'yes' if causal else 'no'}"
    wish = {"action": argparse.BooleanOptionalAction, "default": causal}
    group.add_argument("--causal", help=words, **wish)
    words = "keys visible before a query's position and after it; empty for unbounded"
    sides = {"type": window, "metavar": "L[,R]", "shown": "all"}
    add(group, "window", words, (None, None), **sides)
    words = "bits that say which of the newest tokens each of them sees: of a random tree, random "
    words += "ones, all, or those of a causal block"
    add(group, "tree", words, "", shown="no tree", choices=TREES)
    words = "mask or scores by a function of positions, a recipe of docs/masks.md"
    if recipes:
        add(group, "mask", words, "", shown="none", choices=RECIPES)
        words = "size of the blocks of a block mask: of the mask, or random ones without a mask"
        add(group, "blocks", words, 0, type=count, shown="none")
    add(
        group, "sink-tokens", "first keys that are visible in addition to the window", 0, type=count
    )


def add_scores(group: argparse._ArgumentGroup) -> None:
    """Add flags for operations on scores."""
    words = "replace scores s by C tanh(s / C); 0: leave them as they are"
    add(group, "softcap", words, 0.0, type=float, metavar="C", shown="0")
    switch(group, "sinks", "add a learned logit per query head to the denominator")


# -- running --------------------------------------------------------------------------------------


def add_backend(group: argparse._ArgumentGroup, archs: Sequence[str] = ARCHS) -> None:
    """Add --backend and --arch.

    archs: architectures of the kernel; empty if it runs on all alike."""
    words = "auto: the GPU if the kernel supports it, else the emulator"
    add(group, "backend", words, "auto", choices=BACKENDS)
    if archs:
        words = "architecture that the emulator runs"
        add(group, "arch", words, choices=archs, shown=f"the GPU's, else {archs[0]}")


def add_schedule(group: argparse._ActionsContainer, *, seed: str = "") -> None:
    """--policy and --seed; seed: what else it is of."""
    add(group, "policy", "order in which the emulator runs warps", POLICIES[0], choices=POLICIES)
    of = f"{seed}, and for " * bool(seed)
    add(group, "seed", f"seed for {of}random policies", 0)


def add_run(
    parser: argparse.ArgumentParser,
    archs: Sequence[str] = SERVED,
    *,
    seed: str = "",
    json: str = "every figure",
) -> argparse._ArgumentGroup:
    """The group of a run, whose arguments are those of the functions around; it may get more."""
    group = parser.add_argument_group("run")
    add_backend(group, archs)
    add_schedule(group, seed=seed)
    add_json(group, json)
    return group


def add_tolerance(group: argparse._ArgumentGroup) -> None:
    """Add the flag for the tolerance of results."""
    words = "factor on the error limit"
    add(group, "tolerance", words, 1.0, type=positive, metavar="FACTOR", shown="1")


def add_file(group: argparse._ActionsContainer, name: str, words: str) -> None:
    """`--name FILE`."""
    group.add_argument(f"--{name}", type=output_file, metavar="FILE", help=words)


def add_json(group: argparse._ActionsContainer, what: str = "every figure") -> None:
    """--json; what: that it writes."""
    add_file(group, "json", f"also write {what} to this file")


def picture(text: str) -> Path:
    """Argument type: a file that matplotlib knows how to write."""
    path = Path(text)
    if path.suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text!r}: the name must end in {' or '.join(PICTURES)}")
    return path


def add_plot(group: argparse._ActionsContainer, what: str) -> None:
    """--plot; what: that it draws."""
    words = f"draw {what}, with matplotlib"
    group.add_argument("--plot", type=picture, metavar="FILE", help=words)


def add_out(group: argparse._ActionsContainer, default: str, what: str) -> None:
    """--out; what: that lies there."""
    add(group, "out", what, Path(default), type=Path, metavar="PATH")


def add_report(group: argparse._ArgumentGroup, picture: str) -> None:
    """Add flags for the rows of a benchmark.

    picture: what it draws."""
    add_file(
        group, "show", "print the tables (and --plot) of an earlier run's file; measure nothing"
    )
    switch(group, "markdown", "with --show: one table in Markdown")
    add_file(
        group, "json", "write every figure: one line per row, or an array if the name ends in .json"
    )
    add_plot(group, picture)
