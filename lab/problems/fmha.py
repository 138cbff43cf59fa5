"""Attention as the commands know it: from flags to a case, its run, its plan and its kernel."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fmha import AttentionConfig
from fmha.api import attention, fields_of
from fmha.arguments import Arguments
from fmha.choose import choose_config, longest_queries, problem_of
from fmha.config import TUNABLE
from fmha.launch import ARCHS, compile_attention
from fmha.plan import AttentionPlan, make_plan
from fmha.sections import heads_of_section
from kernelkit.compile.plan_names import warps_of
from kernelkit.plan import hw
from lab.flags.attention import DEMO
from lab.measure.accuracy import ERRORS, LIMIT, errors_of
from lab.problems import family
from lab.problems.attention import Case, Inputs, normalised, references
from lab.problems.family import Family, is_right
from lab.problems.sections import Section, lines_of, parts_of, plural
from lab.sass.kernel import Subject
from lab.sass.softmax import SOFTMAX_KINDS, SoftmaxLoop, Static, static
from lab.tools import tables
from lab.tools.common import describe
from lab.tools.place import Place
from ptxemu import LaunchReport

# Flags that are fields of a Case by the same name.
FIELDS = (
    *("dtype", "kv_dtype", "out_dtype", "scales", "causal", "window", "sink_tokens", "softcap"),
    *(
        "tree",
        "mask",
        "blocks",
        "sinks",
        "q_offset",
        "page_size",
        "rope_dim",
        "k_is_v",
        "pack_heads",
        "pdl",
    ),
    *TUNABLE,
)
# Each asks for something else: ragged tails under causal; a window whose gap to the first keys is
# skipped; decoding with packed heads from pages; packed sequences of a model with softcap.
DEMONSTRATION = (
    Case(200, 333, (2, 1), causal=True),
    Case(100, 700, dtype="fp16", window=(128, 0), sink_tokens=4),
    Case(1, 300, (8, 1), 2, dims=(128, 128), sinks=True, page_size=64, kv_lens=(300, 77)),
    Case(60, 200, (2, 1), 2, softcap=20.0, q_lens=(30, 60), k_lens=(100, 200), out_dtype="fp32"),
)
NAMES = "case: d head dim, w window, h query.KV heads, queries x keys, b batch"
# Those of `kernelkit.plan.hw.SMS_OF`.
GPUS = {
    "sm_80": "an A100", "sm_86": "an RTX 3090", "sm_87": "an Orin", "sm_89": "an RTX 4090",
    "sm_90a": "an H100", "sm_100a": "a B200", "sm_103a": "a B300", "sm_120a": "an RTX 5090",
    "sm_121a": "a DGX Spark",
}  # fmt: skip


def case_of(options: argparse.Namespace, of_shape: tuple[int, ...] = ()) -> Case:
    """The case that the flags spell, with another shape where one is given. Packed entries have
    lengths from 1 / batch of the longest up to it. ValueError for lengths that do not fit the
    batch."""
    keys, batch = options.kv_len, options.batch
    if len(keys) not in (1, batch):
        raise ValueError(f"--kv-len {keys} for --batch {batch} entries: one length, or as many")
    valid = options.kv_lens or (keys if len(keys) > 1 and not of_shape else ())
    shape = of_shape or (batch, options.q_len, max(keys), options.q_heads, options.kv_heads)
    batch, sq, skv, *heads = shape
    if len(valid) == 1 or (options.page_size and not valid):
        valid = (valid or (skv,)) * batch
    lengths = {side: [-(-longest * (entry + 1) // batch) for entry in range(batch)]
               for side, longest in (("q", sq), ("k", skv)) if side in options.packed}  # fmt: skip
    head_dim, v_head_dim = options.head_dim
    return Case(
        *(sq, skv, tuple(heads), batch),
        dims=(head_dim, v_head_dim or head_dim),
        kv_lens=valid or None,
        normalize=not options.raw,
        **{f"{side}_lens": tuple(rows) for side, rows in lengths.items()},
        **{name: getattr(options, name) for name in FIELDS},
    )


def arguments_of(case: Case, device: str) -> Arguments:
    """Return the operator's arguments; on 'meta' they can only be planned, not computed."""
    options = case.arguments()
    del options["return_lse"]
    options = moved(options, device) | case.functions(device)
    return Arguments(**fields_of(*case.inputs(device), options))


def moved(options: dict[str, Any], device: str) -> dict[str, Any]:
    """Move tensors to the device, including those in tuples."""

    def move(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(move, value))
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return {name: move(value) for name, value in options.items()}


def check(case: Case, arch: str = "sm_100a") -> None:
    """Raise ValueError or NotImplementedError for a case that `attention` refuses."""
    arguments_of(case, "cpu").check()
    plan_of(case, arch)


def config_of(case: Case, arch: str = "sm_100a") -> AttentionConfig:
    """Return the config that `attention` compiles for the case; it is not checked yet."""
    return choose_config(arguments_of(case, "meta"), arch)


def plan_of(case: Case, arch: str = "sm_100a") -> AttentionPlan:
    """The checked plan of the config that `attention` chooses for the case."""
    return make_plan(config_of(case, arch), arch)


def role_of_warp(case: Case, arch: str = "sm_100a") -> dict[int, str]:
    """Warp index -> name of its role, in the order of the plan."""
    return warps_of(plan_of(case, arch).roles)


def instructions_by_role(case: Case, arch: str, launches: Sequence[LaunchReport]) -> dict[str, int]:
    """Warp-instructions of all launches per role; empty where nothing was emulated."""
    counts: dict[str, int] = {}
    for warp, role in role_of_warp(case, arch).items() if launches else ():
        executed = sum(launch.by_warp.get(warp, Counter()).total() for launch in launches)
        counts[role] = counts.get(role, 0) + executed
    return counts


def cases_of(options: argparse.Namespace, place: Place) -> list[Attention]:
    """The cases that the flags spell; `run.py fmha` without any has a demonstration. Raises what
    `attention` raises of one of them."""
    shapes = getattr(options, "shape", None)
    cases = [case_of(options, shape) for shape in shapes or [()]]
    batch, sq, skv, *heads = DEMO.values()
    if shapes == [] and cases == [Case(sq, skv, tuple(heads), batch)]:
        cases = list(DEMONSTRATION)
    for case in cases:
        check(case, place.arch)
    return [Attention(case) for case in cases]


@dataclasses.dataclass(frozen=True)
class Attention(family.Problem):
    """A case of `lab.problems.attention`."""

    case: Case

    def __str__(self) -> str:
        return " ".join(self.case.words())

    def draw(self, seed: int, device: str) -> Inputs:
        """Numbers are the case's own, whatever the seed."""
        return self.case.inputs(device)

    def calls(self, drawn: Inputs, place: Place) -> dict[str, Callable[[], Any]]:
        arguments = moved(self.case.arguments(), place.device) | place.given
        arguments |= self.case.functions(place.device)
        return {"": partial(attention, *drawn, **arguments)}

    def judge(self, drawn: Inputs, name: str, results: Any, slack: float) -> dict[str, Any]:
        """Errors of (O normalised, LSE), and what share of `slack` times the tolerance they are."""
        case = self.case
        o = results[0] if case.normalize else normalised(*results)
        pairs = [(result.o.cpu(), result.lse.cpu())
                 for result in references(case, drawn, aligned_sums=drawn[0].is_cuda)]  # fmt: skip
        errors = errors_of((o, results[1]), *pairs, case.coarsest, slack)
        return errors | {"ok": errors["of_limit"] <= 1.0}

    def work(self, launches: Sequence[LaunchReport], place: Place) -> dict[str, Any]:
        """Return the config where it differs from the default, and warp-instructions per role."""
        roles = instructions_by_role(self.case, place.arch, launches)
        return {"config": describe(config_of(self.case, place.arch)), "roles": roles}

    def plan(self, arch: str) -> Iterator[str]:
        arguments = arguments_of(self.case, "meta")
        plan = make_plan(choose_config(arguments, arch), arch)
        yield f"fmha forward: {describe(plan.config)}"
        yield from lines_of((query_blocks(arguments, plan, arch), *parts_of(plan)))

    def kernels(self, arch: str) -> list[Subject]:
        return [subject_of(plan_of(self.case, arch).config, arch)]


# -- run ------------------------------------------------------------------------------------------


def tell(
    rows: Sequence[dict[str, Any]], options: argparse.Namespace, place: Place
) -> dict[str, Any]:
    """Errors against fp64, for a terminal of 80 columns; then seconds, and warp-instructions per
    role where the emulator counted them."""
    console, case = Console(), ("\ncase", "{case}")
    tables.show(*tables.table("", (case, ("\nbackend", "{backend}"), *ERRORS), rows), console)
    roles = dict.fromkeys(role for row in rows for role in row["roles"])
    counts = ((role, f"{{roles[{role}]:,}}") for role in roles)
    columns = ("case", "{case}"), *counts, ("seconds", "{seconds:.1f}")
    title = "warp instructions by role" if roles else ""
    tables.show(*tables.table(title, columns, rows), console)
    wrong = sum(not is_right(row) for row in rows)
    verdict = f"{wrong} of {len(rows)} out of tolerance" if wrong else "all within tolerance"
    console.print("nothing was compared" if options.unjudged else f"{LIMIT}\n{NAMES}\n{verdict}")
    return {"backend": place.reason, "rows": rows}


# -- explain --------------------------------------------------------------------------------------


def query_blocks(arguments: Arguments, plan: AttentionPlan, arch: str) -> Section:
    """Describe what a CTA or a pair computes at a time, and the order of all blocks."""
    layout, config = plan.layout, plan.config
    heads = arguments.batch * arguments.q_heads // config.group
    of_head = layout.blocks(longest_queries(arguments))
    whose = "KV head" if config.group > 1 else "head"
    at_once = hw.SMS_OF[arch] * layout.residents // layout.ctas
    return "Query blocks", [
        ("a block", f"{plural(layout.block_tiles // layout.halves, 'tile')} of {_rows(plan)}"),
        ("all blocks", f"{of_head} per {whose} x {plural(heads, whose)} of all entries"),
        ("launched", _launched(of_head * heads, layout.ctas, at_once, arch)),
        ("order", _order(heads, heads_of_section(problem_of(arguments), config, arch, at_once))),
        ("key tiles", f"{layout.tile_n} keys, {_walked(config)}"),
    ]


def _walked(config: AttentionConfig) -> str:
    """Return which key tiles a block has, in words."""
    if config.block_keys:
        return "of the blocks that a block mask lists"
    return "from the first key that a row of the block sees"


def _rows(plan: AttentionPlan) -> str:
    layout = plan.layout
    if plan.config.group == 1:
        return f"{layout.rows * layout.halves} queries"
    tokens, heads = plural(layout.box_tokens, "token"), plural(layout.box_heads, "head")
    return f"{tokens} x {heads} that share keys"


def _launched(blocks: int, ctas: int, at_once: int, arch: str) -> str:
    """On a GPU all of whose SMs are free."""
    places = min(at_once, blocks)
    least, more = divmod(blocks, max(places, 1))
    who = plural(places, "CTA") if ctas == 1 else f"{plural(places, 'pair')} of CTAs"
    each = f"{least} or {plural(least + 1, 'block')}" if more else plural(least, "block")
    return f"{who} of {at_once} that {GPUS[arch]} runs at once; {each} each"


def _order(heads: int, section: tuple[int, int]) -> str:
    size, near = section
    if near < size or near == 1:
        return "head after head, so that its K and V stay in L2"
    if size < heads:
        return f"the longest of {size} heads first, then of the next {size}, whose keys fit in L2"
    return f"the longest of all {size} heads first"


# -- dump -----------------------------------------------------------------------------------------


def subject_of(config: AttentionConfig, arch: str) -> Subject:
    """The kernel of a config."""
    found: list[Static] = []

    def figures(cubin: Path) -> dict[str, Any]:
        found.append(static(cubin))
        return found[0].as_dict()

    names = {"what": "fmha forward", "stem": "fmha", "config": config, "arch": arch}
    return Subject(
        **names,
        compile=partial(compile_attention, config, arch),
        figures=figures,
        show=lambda _: print_loops(found[0]),
    )


def print_loops(static: Static) -> None:
    """A column per softmax loop."""
    if static.parked:
        print(f"{static.parked} moves that keep uniform registers in others")
    if static.outside:
        print(f"{static.outside} exponentials in straight code: ptxas finds at most one such tile")
    for address, words in static.others.items():
        print(f"other loop at {address:#x}: {words}")
    if not static.loops:
        return
    rows = loop_rows(static.loops)
    width = max(len(row[0]) for row in rows)
    print("\nSoftmax loops, per warp and tile")
    for name, *cells in rows:
        print(f"  {name:<{width}}" + "".join(f"{cell:>14}" for cell in cells))


def loop_rows(loops: tuple[SoftmaxLoop, ...]) -> list[tuple[str, ...]]:
    """A name and a cell per loop: instructions by kind, the correction, positions in the body."""
    kinds = [loop.kinds() for loop in loops]
    places = [loop.publishes() for loop in loops]
    used = [kind for kind in SOFTMAX_KINDS if any(counts[kind] for counts in kinds)]
    return [
        ("loop at", *(f"{loop.address:#x}" for loop in loops)),
        ("", *("masked" if loop.masked else "unmasked" for loop in loops)),
        ("instructions", *(f"{loop.total:g}" for loop in loops)),
        *((f"  {kind}", *(f"{counts[kind]:g}" for counts in kinds)) for kind in used),
        ("correction, elsewhere", *(str(len(loop.correction)) for loop in loops)),
        ("loops inside", *(str(len(loop.nested)) for loop in loops)),
        ("S loaded at", *(span(place.load) for place in places)),
        ("statistics stored at", *(span(place.statistics) for place in places)),
        ("P stored at", *(span(place.p) for place in places)),
        ("P ready at", *(span(place.ready) for place in places)),
        ("row sum after it", *(f"{place.adds_after} FADD2" for place in places)),
    ]


def span(place: float | tuple[float, float] | None) -> str:
    """Format one or two positions in percent of the body."""
    if place is None:
        return "-"
    shares = place if isinstance(place, tuple) else (place,)
    return "-".join(f"{share:.0%}".rstrip("%") for share in shares) + " %"


FAMILY = Family(lambda options: ARCHS, cases_of, tell, says_where=True)
