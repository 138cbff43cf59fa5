"""Names of mbarriers: from the options, else from the Python line that initialises them."""

from __future__ import annotations

from pathlib import Path

import pytest

import ptxemu
from ptxemu.check.barrier_names import BarrierNames
from ptxemu.findings import Access, Finding
from ptxemu.syntax.tree import Instr
from tests.ptxemu import kernels

SOURCE = """\
def kernel(storage, full):
    for stage in range(2):
        cute.arch.mbarrier_init(full + stage, 1)
    cute.arch.mbarrier_init(storage.done.data_ptr(), 1)
    ring = pipeline.PipelineTmaUmma.create(
        num_stages=2,
        barrier_storage=storage.ab_mbar.data_ptr(),
    )
    order = PipelineOrder.create(barrier_storage=storage.turns.data_ptr(), depth=2)
    sync.init(storage.other)
    for stage in range(2):
        cute.arch.mbarrier_init(bars + self.p_full + stage, 1)
    pipeline.MbarrierArray(barrier_storage=storage.array.data_ptr(), num_stages=2)
"""
LINES = {0: 3, 8: 3, 16: 4, 24: 5, 32: 5, 40: 5, 48: 5, 56: 9, 64: 9, 72: 10, 80: 12, 88: 12}
LINES |= {96: 13, 104: 13}
NAMES = (
    *("full[0]", "full[1]", "done", "ab_mbar[0] full", "ab_mbar[1] full", "ab_mbar[0] empty"),
    *("ab_mbar[1] empty", "turns[0]", "turns[1]", "cells+72"),
    *("bars+p_full[0]", "bars+p_full[1]", "array[0]", "array[1]"),
)


@pytest.fixture(params=["inline", "call"])
def barriers(request, tmp_path):
    """given -> BarrierNames. `call`: the line is that of a call; the inner line has no name."""
    path = tmp_path / "source.py"
    path.write_text(SOURCE)
    place = {"inline": ".loc 1 {0} 4", "call": ".loc 2 1 1, function_name $L, inlined_at 1 {0} 4"}
    inits = (
        f"{place[request.param].format(line)}\nmbarrier.init.shared.b64 [cells+{offset}], 1;"
        for offset, line in LINES.items()
    )
    text = (
        kernels.kernel("\n".join(inits), before=".shared .align 8 .b8 cells[128];\n")
        + f'.file 1 "{path}"\n.file 2 "{tmp_path / "nowhere.py"}"\n'
    )
    program = ptxemu.load(text).program(None)
    sites = [item for item in program.entry.body if isinstance(item, Instr)]
    start = program.layout.symbols["cells"][1]
    found = dict(zip((start + offset for offset in LINES), sites, strict=False))
    return start, lambda given: BarrierNames(given, program.layout, found)


def test_names_come_from_the_arguments_of_the_call(barriers):
    start, named = barriers
    assert [named(None).of(start + at) for at in LINES] == [
        f"mbarrier {name} ({start + at:#x})" for name, at in zip(NAMES, LINES, strict=True)
    ]


def test_given_names_come_first_and_findings_are_told_by_them(barriers):
    start, named = barriers
    names = named({start: "Q", "cells+8": "K"})
    agent = f"mbarrier {start + 8:#x} of cta(0,0,0)"
    finding = Finding("mbarrier", f"mbarrier {start:#x} is used", accesses=(Access(agent),))
    told = names.within(finding)
    assert told.message == f"mbarrier Q ({start:#x}) is used"
    assert told.accesses[0].agent == f"mbarrier K ({start + 8:#x}) of cta(0,0,0)"


def test_a_source_that_is_gone_names_nothing(barriers, tmp_path):
    Path(tmp_path / "source.py").unlink()
    start, named = barriers
    assert named(None).of(start + 16) == f"mbarrier cells+16 ({start + 16:#x})"
