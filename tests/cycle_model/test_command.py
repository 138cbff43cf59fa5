"""`python -m cycle_model` models what a script launches, with the installed packages alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cycle_model import __main__ as command
from cycle_model.sass.tools import HOW_TO_GET_TOOLS, tools_found
from lab.house.source import ROOT

SCRIPT = ROOT / "examples" / "bugs" / "column_sums.py"


def refused(capsys, *words: object) -> str:
    with pytest.raises(SystemExit) as ending:
        command.main([*map(str, words)])
    assert ending.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_the_help_imports_nothing_heavy():
    """Neither torch nor the DSL, and nothing of `lab`, which no wheel has."""
    code = "import sys, runpy; sys.argv[1:] = ['--help']\n" \
        "try: runpy.run_module('cycle_model', run_name='__main__')\n" \
        "except SystemExit: print(*sys.modules)"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: python -m cycle_model [options] (SCRIPT | --module")
    assert not {"torch", "cutlass", "lab", "numpy"} & {*done.stdout.splitlines()[-1].split()}


def test_a_script_is_modelled(capsys, tmp_path):
    if not tools_found():
        pytest.skip(HOW_TO_GET_TOOLS)
    file = tmp_path / "new" / "rows.json"
    assert command.main(["--perturbed", "2", "--json", str(file), str(SCRIPT)]) == 0
    text, (row,) = capsys.readouterr().out, json.loads(file.read_text())
    assert row["low"] <= row["us"] <= row["high"]
    assert row["gpu"] == "B200"
    assert f"{row['us']:10.2f} us" in text
    assert f"cluster 0: {row['durations']['0']:,} cycles" in text
    assert "of the critical chain  warp 1 waits for UTMALDG" in text


@pytest.mark.parametrize(("text", "words", "code", "reason"), [
    ("import sys; sys.exit(0)", (), 2, "no kernel with machine code was launched"),
    ("1 / 0", (), 1, "failed: ZeroDivisionError: division by zero"),
    ("", ("--clusters", "0"), 2, "'0': a number from 1 on"),
])  # fmt: skip
def test_other_scripts_are_refused(capsys, tmp_path, text, words, code, reason):
    script = tmp_path / "script.py"
    script.write_text(text)
    try:
        found = command.main([*words, str(script)])
    except SystemExit as ending:
        found = ending.code
    assert found == code
    assert reason in capsys.readouterr().err.splitlines()[-1]


def test_a_gpu_of_another_architecture_is_refused(capsys):
    if not tools_found():
        pytest.skip(HOW_TO_GET_TOOLS)
    said = refused(capsys, "--gpu", "H200", SCRIPT)
    assert said.endswith("--gpu H200 is sm_90a, the kernels are for sm_100a")


def test_a_missing_file_is_refused(capsys):
    assert refused(capsys, "nowhere.py").endswith("there is no file 'nowhere.py'")
