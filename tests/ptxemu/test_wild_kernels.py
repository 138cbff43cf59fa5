"""Kernels with random accesses out of bounds: they never harm the process, and each report
survives.
"""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

import ptxemu
from ptxemu.watch import watched
from tests.ptxemu.wild_kernels import BYTES, FORMS, Wild, guarded, wild

POLICIES = ("round-robin", "random", "adversarial")


def run(case: Wild, start: int, policy: str, *, check: bool, listed: bool) -> ptxemu.LaunchReport:
    """Launch a case. listed: the caller names its memory; otherwise known allocations count."""
    memory = (start, BYTES)
    return ptxemu.load(case.text).launch(
        grid=(1,),
        block=(case.threads,),
        params=case.params,
        options=ptxemu.Options(check=check, policy=policy, limit=20),
        memory=[memory] if listed else None,
        allocated=None if listed else [(start, start + BYTES, True)],
    )


def judge(seed: int) -> None:
    """Run a kernel with and without the checker: it is refused or reported exactly if it goes
    astray."""
    memory, start = guarded()
    offset = start - memory.ctypes.data
    case, policy = wild(seed, start), POLICIES[seed % 3]
    outside = np.ones(len(memory), bool)
    outside[offset : offset + BYTES] = False
    with watched(check=True) as report:
        try:
            run(case, start, policy, check=True, listed=bool(seed % 2))
            stopped = False
        except ptxemu.PtxEmuError:
            stopped = True  # such as for a tensor map that was poison
    found = [f for launch in report.launches for f in launch.findings if f.check == "out-of-bounds"]
    assert bool(found) == case.astray, (seed, case.form, stopped)
    assert all(f.severity == "error" and f.line and f.accesses for f in found)
    assert (memory[outside] == 0x5A).all(), seed
    refusal = None
    try:
        run(case, start, policy, check=False, listed=bool(seed % 2))
    except ptxemu.OutOfBounds as error:
        refusal = error
    assert (refusal is not None) == case.astray, (seed, case.form)
    assert refusal is None or refusal.line
    assert (memory[outside] == 0x5A).all(), seed


@pytest.mark.parametrize("number", range(len(FORMS)))
def test_each_form(number: int) -> None:
    judge(number)


@pytest.mark.parametrize("block", range(8))
def test_two_hundred_kernels(block: int) -> None:
    for seed in range(1000 + 25 * block, 1025 + 25 * block):
        judge(seed)


PROCESS = """
import os, sys
from pathlib import Path
import ptxemu
from argparse import Namespace
from ptxemu.host.command_line import checking
from tests.ptxemu.test_wild_kernels import POLICIES, run
from tests.ptxemu.wild_kernels import guarded, wild
first, last, ending = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
wanted = Namespace(check=True, strict=False, check_json=Path(sys.argv[4]))
memory, start = guarded()
with checking(wanted):
    for seed in range(first, last):
        case = wild(seed, start)
        print(int(case.astray), flush=True)
        try:
            run(case, start, POLICIES[seed % 3], check=True, listed=False)
        except ptxemu.PtxEmuError:
            pass
    if ending == "exit":
        os._exit(0)
    if ending == "kill":
        os.kill(os.getpid(), 9)
"""
CODES = {"return": 0, "exit": 0, "kill": -9}


@pytest.mark.parametrize("ending", CODES)
def test_a_process_of_its_own(ending: str, tmp_path) -> None:
    path = tmp_path / "new" / "findings.json"
    words = [sys.executable, "-c", PROCESS, "2000", "2025", ending, str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == CODES[ending], done.stderr
    astray = [line for line in done.stdout.splitlines() if line in ("0", "1")].count("1")
    assert astray >= 10
    partial = path.with_name("findings.json.partial")
    assert path.exists() == (ending == "return") != partial.exists()
    if ending == "return":
        launches = json.loads(path.read_text())["launches"]
        found = [f for launch in launches for f in launch["findings"]]
    else:
        found = [json.loads(line) for line in partial.read_text().splitlines()]
    assert sum(f.get("check") == "out-of-bounds" for f in found) == astray


MIDDLE = """
import os, signal, sys
from argparse import Namespace
from pathlib import Path
import ptxemu
from ptxemu.host.command_line import checking
from tests.ptxemu.kernels import kernel, launch
ending, path = sys.argv[1], Path(sys.argv[2])
acts = {
    "kill": lambda *_: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda *_: os._exit(3),
    "interrupt": signal.default_int_handler,
}
limit = 1.0 if ending == "limit" else None
if limit is None:
    signal.signal(signal.SIGALRM, acts[ending])
    signal.setitimer(signal.ITIMER_REAL, 1.0)
text = kernel("mov.u64 %rd1, 64;\\nst.global.b64 [%rd1], %rd1;\\nAGAIN:\\nbra AGAIN;")
with checking(Namespace(check=True, strict=False, check_json=path)):
    launch(text, check=True, limit=limit, allocated=[])
"""


@pytest.mark.parametrize("ending", ["kill", "exit", "interrupt", "limit"])
def test_the_middle_of_a_launch(ending: str, tmp_path) -> None:
    """A process that dies, or is stopped, while a kernel runs, keeps its findings."""
    path = tmp_path / "findings.json"
    words = [sys.executable, "-c", MIDDLE, ending, str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == {"kill": -9, "exit": 3, "interrupt": -2, "limit": 1}[ending], done
    if ending in ("kill", "exit"):
        kept = path.with_name("findings.json.partial").read_text().splitlines()
        found = [json.loads(line) for line in kept]
    else:
        assert {"interrupt": "KeyboardInterrupt", "limit": "LimitExceeded"}[ending] in done.stderr
        launches = json.loads(path.read_text())["launches"]
        found = [finding for launch in launches for finding in launch["findings"]]
    assert [one["line"] for one in found if one.get("check") == "out-of-bounds"] == [13]
