"""The house as docs/architecture.md draws it: detection of cycles and upward arrows, few hops.

test_house_rules.py, which parses every file, checks that there are none.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from lab.house.graph import house
from lab.house.hops import GOALS, LIMITS, hops, trips
from lab.house.perform import table_of_files
from lab.house.source import ROOT, Source

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def sources(**texts: str) -> list[Source]:
    return [Source(PurePosixPath(name), text) for name, text in texts.items()]


def test_a_circle_of_files_and_one_of_folders_are_seen():
    """Imports inside a function or for type checkers count, as do those in lab/, and through files
    that are in no cycle by themselves."""
    lazily = "def f():\n    from kernelkit.device import tmem\n"
    found = house(sources(**{
        "kernelkit/device/tmem.py": "from kernelkit.device import umma\n",
        "kernelkit/device/umma.py": lazily,
        "ptxemu/ops/control.py": "from ptxemu.machine import state\n",
        "ptxemu/machine/deadlock.py": "from ptxemu.ops import control\n",
    }))  # fmt: skip
    assert found.circles() == [
        ["kernelkit/device/tmem.py", "kernelkit/device/umma.py"],
        ["ptxemu/machine", "ptxemu/ops"],
    ]
    typed = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n"
    typed += "    from lab.soak import small_caches\n"
    found = house(sources(**{
        "lab/soak/ledger.py": typed,
        "lab/soak/small_caches.py": "from lab.soak import ledger\n",
    }))  # fmt: skip
    assert found.circles() == [["lab/soak/ledger.py", "lab/soak/small_caches.py"]]


def test_an_arrow_upwards_is_seen():
    found = house(sources(**{"kernelkit/device/tmem.py": "import moe.config\n"}))
    assert found.upwards() == [("kernelkit", "moe")]


def test_files_stand_side_by_side():
    (table,) = re.findall(r"<!-- files -->\n(.*?)\n<!-- end of files -->", PAGE, re.DOTALL)
    assert table == table_of_files()


def test_hops_of_a_second_call():
    found = {name: len(files) for name, files in hops().items()}
    assert found.keys() == LIMITS.keys()
    assert not {name: count for name, count in found.items() if count > LIMITS[name]}
    assert found["attention"] == found["decode"]
    words = (
        "{attention} for attention and decode, {fused_moe} for `fused_moe`, "
        "{append_rows} for `append_rows`"
    )
    assert words.format_map(found) in " ".join(PAGE.split())


def test_a_checked_call_goes_through_no_more_files_than_it_did():
    """lab.house.hops.GOALS has the goals of the design; these are ceilings on the way to them."""
    ceilings = {
        "attention": (12, 44), "decode": (12, 42), "fused_moe": (17, 179), "append_rows": (12, 38),
    }  # fmt: skip
    found = {name: (len(trip.files), trip.moves) for name, trip in trips().items()}
    assert found.keys() == GOALS.keys()
    assert all(files <= ceilings[name][0] for name, (files, _) in found.items()), found
    assert all(moves <= ceilings[name][1] for name, (_, moves) in found.items()), found
