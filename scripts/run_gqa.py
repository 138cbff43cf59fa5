"""Runs the decode attention kernel and prints how exact it is, and on a GPU how long it takes.

A GPU of compute capability 9.0 or 10.x runs the kernel itself; everywhere else the emulator runs
the PTX of --arch. The yardstick is the fp64 definition, and beside each error stands the one that
the reference with the kernel's own rounding points makes. Exit code 1 when a case is out of
tolerance or the checker finds an error, 2 when a case is refused.

    python scripts/run_gqa.py --kvL 8192 --kvH 8 --qH 64 --BS 1 --arch sm_90a
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from _accuracy import ERRORS, cells, coarser, errors_of, positive, table_of_cases
from _common import refuse, write_json
from _timing import measure, setting
from gqa_lowlatency import DecodeConfig, decode, decode_plan, reference
from gqa_lowlatency.config import HEAD_DIMS, TUNABLE
from kernelkit.launch import ARCH_OF_CAPABILITY, BACKENDS, WRITTEN_FOR, emulation
from ptxemu.check import text
from ptxemu.host.command_line import add_check_arguments, checking, wanted
from ptxemu.options import POLICIES, Options

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OUT_DTYPES = DTYPES | {"fp32": torch.float32}
KV_DTYPES = DTYPES | {"e4m3": torch.float8_e4m3fn}
SEED = 0
SPARE_PAGES = 1  # pages of the pool that belong to no entry
ROWS, LAUNCHES = 10, 200


@dataclasses.dataclass(frozen=True)
class Case:
    """What the flags spell, by their names; kvL has one length or one for each entry."""

    BS: int
    kvL: tuple[int, ...]
    kvH: int
    qH: int
    qL: int
    head_dim: int
    dtype: str
    kv_dtype: str
    page_size: int
    sinks: bool
    arch: str
    options: dict[str, Any]
    tuning: dict[str, int]

    def __str__(self) -> str:
        lengths = ",".join(map(str, self.kvL))
        words = [f"BS{self.BS} kvL{lengths} kvH{self.kvH} qH{self.qH} qL{self.qL}"]
        words += [f"d{self.head_dim} {self.dtype}" + f"/{self.kv_dtype}" * bool(self.kv_dtype)]
        words += [f"pages({self.page_size})"] * bool(self.page_size) + ["sinks"] * self.sinks
        words += ["full"] * (not self.options["causal"])
        plain = {**self.options, **self.tuning, "causal": None}
        words += [f"{name}({value})" for name, value in plain.items() if value]
        return " ".join(words)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Keys of each entry."""
        return self.kvL * self.BS if len(self.kvL) == 1 else self.kvL

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v, standard normal."""
        generator = torch.Generator().manual_seed(SEED)
        longest, kv = max(self.lengths), KV_DTYPES[self.kv_dtype or self.dtype]
        rows: tuple[int, ...] = (self.BS, longest)
        if self.page_size:
            rows = (self.BS * -(-longest // self.page_size) + SPARE_PAGES, self.page_size)
        q = torch.randn((self.BS, self.qL, self.qH, self.head_dim), generator=generator)
        shape = (*rows, self.kvH, self.head_dim)
        k, v = (torch.randn(shape, generator=generator).to(kv) for _ in range(2))
        return q.to(DTYPES[self.dtype]), k, v

    @cached_property
    def tables(self) -> dict[str, torch.Tensor]:
        """Lengths, page numbers and sinks, by the names of `decode`."""
        generator = torch.Generator().manual_seed(SEED)
        found = {}
        if self.page_size or len(self.kvL) > 1:
            found["seq_lens"] = torch.tensor(self.lengths, dtype=torch.int32)
        if self.page_size:
            pages = -(-max(self.lengths) // self.page_size)
            order = torch.randperm(self.BS * pages, generator=generator)
            found["page_table"] = order.view(self.BS, pages).int()
        if self.sinks:
            found["sinks"] = torch.randn(self.qH, generator=generator)
        return found


def run(case: Case, backend: str, options: Options) -> dict[str, Any]:
    """Results of one case, the seconds until they were there, and GPU times where there is one."""
    device = "cuda" if backend == "cuda" else "cpu"
    tensors = [tensor.to(device) for tensor in case.tensors]
    tables = {name: table.to(device) for name, table in case.tables.items()}
    config = DecodeConfig(**case.tuning) if case.tuning else None
    arch = None if backend == "cuda" else case.arch
    given = {**tables, **case.options, "arch": arch, "backend": backend, "config": config}
    start = time.perf_counter()
    with emulation(options) as emulated:
        results = decode(*tensors, return_lse=True, **given)
    if backend == "cuda":
        torch.cuda.synchronize()
    found = {"results": results, "seconds": time.perf_counter() - start}
    if backend != "cuda":
        launches = [launch for report in emulated.reports for launch in report.launches]
        counts = [count.total() for launch in launches for count in launch.by_warp.values()]
        return found | {"instructions": sum(counts)}
    plan = decode_plan(*tensors, **given)
    moving = {name: tables[name] for name in ("seq_lens", "page_table") if name in tables}
    out, lse = (torch.empty_like(result) for result in results)
    launch = partial(plan, *tensors, **moving, out=out, lse=lse)
    times = measure(launch)
    return found | {
        "warm_us": times.warm * 1e6, "cold_us": times.cold * 1e6, "host_us": host_us(launch),
    }  # fmt: skip


def host_us(launch: Callable[[], object]) -> float:
    """What a launch costs the host: the best of several rows that fit the queue of the GPU."""
    rows = []
    for _ in range(ROWS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            launch()
        rows.append((time.perf_counter() - start) / LAUNCHES)
    torch.cuda.synchronize()
    return min(rows) * 1e6


def judged(case: Case, backend: str, options: Options, slack: float) -> dict[str, Any]:
    """A row of the tables: errors, and what `run` found beside the results."""
    found = run(case, backend, options)
    result = found.pop("results")
    changes = {name: value for name, value in case.options.items() if name in REFERENCE_KNOWS}
    given = case.tables | changes | {"arch": WRITTEN_FOR.get(case.arch, case.arch)}
    exact, rounded = (
        judge(*case.tensors, **given) for judge in (reference.definition, reference.rounded)
    )
    grain = coarser((DTYPES[case.dtype], result[0].dtype))
    pairs = (exact.o, exact.lse), (rounded.o, rounded.lse)
    errors = errors_of(result, *pairs, grain, slack)
    return {"case": str(case), "backend": backend, "arch": case.arch, **errors, **found}


REFERENCE_KNOWS = {field.name for field in dataclasses.fields(reference.Options)}


def show(row: dict[str, Any], console: Console) -> None:
    """Errors, and beside them the time of a launch or the work of the emulator."""
    on_gpu = "warm_us" in row
    columns = ("warp-\ninstr.", "\nseconds")
    if on_gpu:
        columns = ("warm\nus", "cold\nus", "host\nus")
    table = table_of_cases("\nrun as", *ERRORS, "", *columns)
    numbers = [f"{row.get('instructions', 0):,}", f"{row['seconds']:.1f}"]
    if on_gpu:
        numbers = [f"{row[name]:.1f}" for name in ("warm_us", "cold_us", "host_us")]
    table.add_row(row["case"], f"{row['backend']}\n{row['arch']}", *cells(row), *numbers)
    console.print(table)


def lengths(text: str) -> tuple[int, ...]:
    """Argument type: '8192' for all entries or '100,7,0'."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of key counts") from error
    if min(found) < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: lengths are at least 0")
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=__doc__.rstrip().splitlines()[-1].strip()
    )
    group = parser.add_argument_group("problem")
    group.add_argument("--BS", type=int, default=1, metavar="N", help="batch entries; 1")
    group.add_argument(
        "--kvL", type=lengths, default=(1024,), metavar="N,...", help="keys, of all or each; 1024"
    )
    for flag, value, words in (
        ("--kvH", 2, "KV heads"), ("--qH", 16, "query heads"), ("--qL", 1, "query tokens"),
    ):  # fmt: skip
        group.add_argument(flag, type=int, default=value, metavar="N", help=f"{words}; {value}")
    group.add_argument("--D", dest="head_dim", type=int, default=128, help=f"one of {HEAD_DIMS}")
    group.add_argument("--dtype", choices=DTYPES, default="bf16", help="of q, k and v; bf16")
    group.add_argument("--kv-dtype", choices=KV_DTYPES, default="", help="of k and v alone")
    group.add_argument("--out-dtype", choices=OUT_DTYPES, default="", help="of O")
    group.add_argument("--page-size", type=int, default=0, metavar="ROWS", help="0: no pages")
    group.add_argument("--full", action="store_true", help="tokens see those behind them")
    group.add_argument("--window", type=int, metavar="N", help="keys seen before the own one")
    group.add_argument("--sink-tokens", type=int, default=0, metavar="N", help="beside the window")
    group.add_argument("--softcap", type=float, default=0.0, metavar="C", help="c tanh(s / c)")
    group.add_argument("--sinks", action="store_true", help="a learned logit per query head")
    _add_run_arguments(parser.add_argument_group("run"))
    add_check_arguments(parser)
    return parser.parse_args()


def _add_run_arguments(group: argparse._ArgumentGroup) -> None:
    for name in TUNABLE:
        words = "of the config; chosen by sizes"
        group.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=words)
    group.add_argument("--batch-invariant", action="store_true", help="bits ignore the batch")
    group.add_argument("--pdl", action="store_true", help="programmatic dependent launch")
    group.add_argument("--arch", choices=("sm_100a", "sm_90a"), help="what the emulator runs")
    group.add_argument("--backend", choices=BACKENDS, default="auto", help="default: auto")
    group.add_argument("--policy", choices=POLICIES, default="round-robin", help="of the emulator")
    group.add_argument("--seed", type=int, default=0, help="of the policies with chance")
    group.add_argument(
        "--tolerance", type=positive, default=1.0, metavar="FACTOR", help="scales every limit"
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")


def case_of(arguments: argparse.Namespace) -> Case:
    """The case that the flags spell."""
    names = ("BS", "kvL", "kvH", "qH", "qL", "head_dim", "dtype", "kv_dtype", "page_size", "sinks")
    options = {name: getattr(arguments, name) for name in (
        "window", "sink_tokens", "softcap", "batch_invariant", "pdl",
    )}  # fmt: skip
    options["out_dtype"] = OUT_DTYPES.get(arguments.out_dtype)
    tuning = {name: getattr(arguments, name) for name in TUNABLE}
    return Case(
        **{name: getattr(arguments, name) for name in names},
        arch=arguments.arch,
        options=options | {"causal": not arguments.full},
        tuning={name: value for name, value in tuning.items() if value is not None},
    )


def choose_place(arguments: argparse.Namespace) -> None:
    """Backend and arch for 'auto' and none: the GPU's where there is one, else the emulator."""
    native = None
    if torch.cuda.is_available():
        native = ARCH_OF_CAPABILITY.get(torch.cuda.get_device_capability())
    if arguments.backend == "auto":
        asked = wanted(arguments) or arguments.arch not in (None, WRITTEN_FOR.get(native, native))
        arguments.backend = "emulate" if asked or native is None else "cuda"
    if arguments.backend == "cuda":
        if native is None:
            raise ValueError("backend 'cuda': no GPU of compute capability 9.0 or 10.x here")
        if wanted(arguments):
            raise ValueError("backend 'cuda': the checker is the emulator's")
        arguments.arch = native
    arguments.arch = arguments.arch or "sm_100a"


def main() -> int:
    arguments = parse_arguments()
    console = Console()
    options = Options(policy=arguments.policy, seed=arguments.seed, limit=None)
    try:
        choose_place(arguments)
        case = case_of(arguments)
        if len(case.lengths) != case.BS:
            raise ValueError(f"--kvL {case.kvL} for --BS {case.BS} entries: one length, or as many")
        with checking(arguments) as report:
            row = judged(case, arguments.backend, options, arguments.tolerance)
    except (ValueError, NotImplementedError) as refused:
        return refuse(refused)
    show(row, console)
    right = row["of_limit"] <= 1.0
    if arguments.json:
        checks = {"checks": text.document(report, counts=False)} if wanted(arguments) else {}
        write_json(arguments.json, {"setting": setting(), "row": {**row, "ok": right}, **checks})
    console.print("reference: plain torch with the kernel's roundings; limit: 2 x that + 1 ulp")
    console.print("within tolerance" if right else "out of tolerance")
    return 0 if right and not report.errors else 1


if __name__ == "__main__":
    sys.exit(main())
