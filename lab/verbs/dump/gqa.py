"""What `dump.py gqa` says beside resources: the loop over keys, of one config or of a grid."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gqa_lowlatency.config import COLUMNS, HEAD_DIMS, DecodeConfig
from gqa_lowlatency.launch import compile_for
from kernelkit.plan import hw
from lab.cases.decode import Case, case_of, cta_of, settled
from lab.sass import decode
from lab.tools.common import changed, refuse
from lab.tools.groups import ARCHS
from lab.verbs.dump.files import print_kinds
from lab.verbs.dump.kernel import Cell, Subject, dump_all, dump_grid

KV_DTYPES = ("bf16", "e4m3")  # of the grid
GRID = tuple(itertools.product(ARCHS[::-1], KV_DTYPES, HEAD_DIMS, COLUMNS))


def subject_of(config: DecodeConfig, arch: str) -> Subject:
    """The kernel of a config."""
    cta = cta_of(config, arch)
    planned = {"warps": cta.threads // hw.WARP_THREADS, "stages": cta.stages}
    planned |= {"smem_bytes": cta.smem_bytes}
    return Subject(
        *("gqa_lowlatency", "gqa", config, arch),
        compile=partial(compile_for, config, arch),
        figures=lambda cubin: planned | decode.figures(cubin, config, arch),
        show=lambda found: print_kinds(
            f"Loop over keys, per warp and {found['unit']}", found["loop"]
        ),
    )


# -- the grid -------------------------------------------------------------------------------------


def cell_of(case: Case, columns: int) -> Cell:
    """The config of a case with so many columns."""

    def figures(folder: Path) -> dict[str, Any]:
        _, config = settled(case)
        if config.columns != columns:
            raise ValueError(f"{config.row_tiles} row tiles of {config.columns} instead")
        subject = subject_of(config, case.arch)
        return {"config": changed(config)} | subject.figures(subject.write(folder)[1])

    names = ("arch", "kv_dtype", "head_dim")
    return {name: getattr(case, name) for name in names} | {"columns": columns}, figures


def cases_of(case: Case) -> Iterator[tuple[Case, int]]:
    """(case, columns) of the grid; all that it does not vary is as in `case`."""
    for arch, kv_dtype, head_dim, columns in GRID:
        q_heads = case.kv_heads * max(1, columns // case.q_len)
        fields = {"arch": arch, "kv_dtype": kv_dtype, "head_dim": head_dim, "q_heads": q_heads}
        yield replace(case, **fields), columns


FIGURES = (
    ("arch", "{arch}"), ("K, V", "{kv_dtype}"), ("head_dim", "{head_dim}"),
    ("columns", "{columns}"), ("cluster", lambda row: str(row["config"].get("cluster", 1))),
    ("warps", "{warps}"), ("stages", "{stages}"), ("registers", "{registers}"),
    ("stack", "{stack}"), ("spills", "{spills}"), ("SMEM bytes", "{smem_bytes:,}"),
    ("SASS", "{instructions}"), ("loop", lambda row: f"{sum(row['loop'].values()):g}"),
)  # fmt: skip


def perform(options: argparse.Namespace) -> int:
    try:
        case = case_of(options)
    except ValueError as refusal:
        return refuse(refusal)
    if options.grid:
        cells = [cell_of(*one) for one in cases_of(case)]
        return dump_grid(options, cells, FIGURES, case=f"{case}, but for what a row names")

    def subjects() -> list[Subject]:
        return [subject_of(settled(case)[1], case.arch)]

    return dump_all(options, subjects, case=str(case))
