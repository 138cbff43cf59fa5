"""A report as text, HTML and JSON."""

from __future__ import annotations

import json

import numpy as np

import ptxemu
from ptxemu.options import Options
from ptxemu.report import Report
from tests.ptxemu.kernels import POINTER, kernel

# Two CTAs store different values at one place.
BODY = f"{POINTER}mov.u32 %r1, %ctaid.y;\nst.global.u32 [%rd2], %r1;"
STORE = ptxemu.load(kernel(BODY, ".param .u64 d"))


def launched(**options: object) -> ptxemu.LaunchReport:
    args = [np.zeros(64, np.uint32)]
    return STORE.launch(grid=(1, 2), block=64, args=args, options=Options(**options))


def test_text_of_a_launch_that_was_not_checked():
    report = launched()
    report.seconds = 0.25
    assert str(report).splitlines() == [
        "test: grid (1, 2), block 64, cluster 1",
        "  24 warp-instructions of 2 warps per CTA, 0.25 s",
        "  bytes: st.global 512",
        "not checked: Options(check=True) looks for races, overruns and the like",
    ]


def test_text_of_a_checked_launch_has_its_findings():
    lines = str(launched(check=True)).splitlines()
    assert lines[0].startswith("test: grid (1, 2)")
    assert "not checked" not in "".join(lines)
    assert [line for line in lines if line.startswith(("error: ", "note: "))]
    assert lines[-1].endswith("in 1 launch; rules: hardware")


def test_text_of_many_launches_is_short():
    report = launched()
    lines = str(Report([report] * 30)).splitlines()
    assert lines[-2:] == ["and 10 more launches", str(report).splitlines()[-1]]
    assert len(lines) == 3 * 20 + 2


def test_a_launch_that_was_stopped_says_why():
    report = launched()
    report.stopped = "Deadlock: <nobody> arrives"
    assert "stopped: Deadlock: <nobody> arrives" in str(report)
    assert report._repr_html_().startswith("<pre>test: grid (1, 2)")
    assert "&lt;nobody&gt;" in report._repr_html_()
    assert Report([report])._repr_html_() == report._repr_html_()


def test_json_has_the_findings_and_plain_values():
    report = launched(check=True, record=True)
    assert report.recording is not None
    found = json.loads(json.dumps(Report([report]).to_json()))
    assert found["launches"] == [json.loads(json.dumps(report.to_json()))]
    (launch,) = found["launches"]
    assert (launch["entry"], launch["grid"], launch["warp_instructions"]) == ("test", [1, 2, 1], 24)
    assert [f["check"] for f in launch["findings"]] == [f.check for f in report.findings]
    assert found["errors"] == len(report.errors)
