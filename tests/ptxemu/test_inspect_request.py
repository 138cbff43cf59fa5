"""What a user may ask for: conditions, stops, regions, watches, flags; all else is refused."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import numpy as np
import pytest

import ptxemu
from ptxemu.host.command_line import add_inspect_arguments, inspecting, inspection_of
from ptxemu.inspect import Inspect, Region, Stop, Watch
from ptxemu.request import Condition
from tests.ptxemu.kernels import kernel, launch

VALUES = {"step": 3, "warp": 4, "cta": 1, "r7": 0xFFFFFFFF, "f1": 1.5, "lane": np.arange(4)}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("", True),
        ("step==3", True),
        ("step==3 and warp!=4", False),
        ("not step < 2 < warp", True),
        ("s32(%r7) == -1", True),
        ("%r7 > 0", True),
        ("r7 >> 31 & 1", True),
        ("f1 * 2 == 3", True),
        ("%f1 > 1 or nothing", None),  # every name must have a value
        ("lane == 2", True),
        ("all(lane < 3)", False),
        ("f32(0x3fc00000) == %f1", True),
        ("step % 2", True),
        ("step %2 == 1", True),
        ("-step + 3", False),
    ],
)
def test_conditions(text, holds):
    if holds is None:
        with pytest.raises(ValueError, match="nothing is called 'nothing'"):
            Condition(text).holds(VALUES)
    else:
        assert Condition(text).holds(VALUES) is holds


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "().__class__",
        "step.real",
        "[x for x in (1,)]",
        "lambda: 1",
        "'a' * 3",
        "step ** 9",
        "open(1)",
        "any(1, 2)",
        "step if warp else 1",
        "(a := 1)",
        "lane[0]",
        "step ==",
        "1" * 2000,
    ],
)
def test_nothing_but_numbers_can_be_said(text):
    with pytest.raises(ValueError, match="condition"):
        Condition(text)


@pytest.mark.parametrize("text", ["1 << 999999999", "step // 0", "f1 & 1", "step << 200"])
def test_what_cannot_be_computed_is_refused(text):
    with pytest.raises(ValueError, match="condition"):
        Condition(text).holds(VALUES)


def test_regions_and_watches_in_words():
    assert Region.parse("A=0x400,128,64,bf16,128B") == Region("A", 1024, 128, 64, "bf16", "128B")
    assert Region.parse("b=0,1,4,u8") == Region("b", 0, 1, 4, "u8")
    assert Watch.parse("smem:1024+16@2") == Watch("shared", 1024, 16, cta=2)
    assert Watch.parse("tmem:0+32@1,0,2") == Watch("tensor", 0, 32, cta=(1, 0, 2))
    assert Watch.parse("param2:8+4") == Watch("global", 8, 4, parameter=2)
    assert Watch.parse("global:0x7000+64") == Watch("global", 0x7000, 64)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Region.parse("A=1,2,3"),
        lambda: Region.parse("A=1,2,x,u8"),
        lambda: Region.parse("A=1,2,3,float"),
        lambda: Region.parse("A=1,2,3,u8,swirl"),
        lambda: Region("A", 0, 0, 3, "u8"),
        lambda: Watch.parse("param:0+4"),
        lambda: Watch.parse("smem1:0+4"),
        lambda: Watch.parse("smem:0"),
        lambda: Watch.parse("heap:0+4"),
        lambda: Watch("tensor", 500, 32),
        lambda: Watch("shared", 0, 0),
        lambda: Stop("kernel.py"),
        lambda: Stop("kernel.py:1", dump=()),
        lambda: Stop("kernel.py:1", dump=("stack",)),
        lambda: Stop("kernel.py:1", limit=0),
        lambda: Stop("kernel.py:1", when="import os"),
        lambda: Inspect(keep=0),
        lambda: Inspect(last=-1),
    ],
)
def test_what_cannot_be_meant_is_refused(wrong):
    with pytest.raises(ValueError, match=r"\w"):
        wrong()


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_inspect_arguments(parser)
    parser.format_help()
    return parser.parse_args(words)


def test_flags_become_a_request():
    flags = "--dump smem,regs --at a.py:7 --at ptx:9 --cta 1,0 --warp 4 --when step==3 --last 9"
    found = inspection_of(parsed(*flags.split(), "--watch", "smem:0+4", "--region", "x=0,1,1,f32"))
    assert [stop.at for stop in found.stops] == ["a.py:7", "ptx:9"]
    stop = found.stops[0]
    assert (stop.dump, stop.cta, stop.warp) == (("smem", "regs"), (1, 0, 0), 4)
    assert (stop.when, stop.regions[0].name) == ("step==3", "x")
    assert (found.last, found.watches, found.folder) == (
        9, (Watch("shared", 0, 4),), "ptxemu_dump",
    )  # fmt: skip
    assert inspection_of(parsed()) is None


@pytest.mark.parametrize("words", [["--dump", "smem"], ["--at", "a.py:7"]])
def test_what_and_where_belong_together(words):
    with pytest.raises(ValueError, match="belong together"):
        inspecting(parsed(*words))


@pytest.mark.parametrize("words", [["--dump", "heap"], ["--watch", "x"], ["--cta", "a"]])
def test_flags_are_refused_in_words(words, capsys):
    with pytest.raises(SystemExit):
        parsed(*words)
    assert "must be" in capsys.readouterr().err or words[0] == "--watch"


def test_launches_within_are_looked_at(monkeypatch):
    monkeypatch.delenv("CUTE_DSL_LINEINFO", raising=False)
    with inspecting(parsed("--last", "3", "--name-printf")) as report:
        assert os.environ["CUTE_DSL_LINEINFO"] == "1"
        launched = launch(kernel(""))
    assert "CUTE_DSL_LINEINFO" not in os.environ
    assert report.launches == [launched]
    assert "the last 3 of" in launched.inspection.last_events()
    assert launched.options.name_printf
    with inspecting(parsed()):
        assert launch(kernel("")).inspection is None


PAGE = Path(ptxemu.__file__).parent / "inspect" / "README.md"


def test_the_example_of_the_page_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})
    told = capsys.readouterr().out
    assert "5 5" in told
    assert "lanes 5" in told
    assert "x[1] differs: 1 and 0; 30 of 32 elements differ" in told


def test_the_flags_of_the_page_exist():
    parser = argparse.ArgumentParser(add_help=False)
    add_inspect_arguments(parser)
    known = set(re.findall(r"--[a-z-]+", parser.format_help()))
    named = set(re.findall(r"--[a-z][a-z-]*", PAGE.read_text())) - {"--its", "--arguments"}
    assert named <= known
