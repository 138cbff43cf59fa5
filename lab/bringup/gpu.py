"""Queries about a GPU from outside the process that uses it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

FIELDS = ("name", "driver_version", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw",
          "pstate", "ecc.errors.uncorrected.volatile.total")  # fmt: skip
SECONDS = 30.0  # for nvidia-smi
PROBE_SECONDS = 90.0  # for a first kernel, with all that torch loads
TRIES, PAUSE = 3, 20.0  # and seconds between them
PROBE = """\
import torch
x = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
assert x.sum().item() == 549755289600.0, "a sum is wrong"
print(torch.cuda.get_device_name())
"""


def seen(gpu: str) -> dict[str, str]:
    """Part of the environment of a process that sees one GPU alone, by the number or name that
    nvidia-smi has for it; nothing for the one that processes see first."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpu} if gpu else {}


def state(gpu: str) -> dict[str, str]:
    """Clocks, temperature and errors, as nvidia-smi says them; empty where it says nothing."""
    first = gpu or os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
    asked = ["nvidia-smi", f"--id={first}", f"--query-gpu={','.join(FIELDS)}",
             "--format=csv,noheader"]  # fmt: skip
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(FIELDS, (word.strip() for word in said.stdout.split(",")), strict=False))


def name(gpu: str) -> str:
    """Return the name of a GPU by nvidia-smi, else by torch in another process; '' if both fail."""
    if found := state(gpu).get("name"):
        return found
    asked = "import torch; print(torch.cuda.get_device_name())"
    try:
        said = subprocess.run(
            [sys.executable, "-c", asked], capture_output=True, text=True, check=True,
            timeout=PROBE_SECONDS, env={**os.environ, **seen(gpu)},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.stdout.strip()


def answers(
    gpu: str,
    tries: int = TRIES,
    pause: float = PAUSE,
    *,
    sleep: Callable[[float], Any] = time.sleep,
) -> str:
    """'' where a new process gets a right sum from the GPU, else what it got instead. A GPU whose
    process was ended takes a while to be free."""
    said = ""
    for number in range(tries):
        if number:
            sleep(pause)
        try:
            probe = subprocess.run(
                [sys.executable, "-c", PROBE], capture_output=True, text=True,
                timeout=PROBE_SECONDS, check=False, env={**os.environ, **seen(gpu)},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            said = f"a sum was not there after {PROBE_SECONDS:.0f} s"
            continue
        if probe.returncode == 0:
            return ""
        lines = (probe.stderr or probe.stdout).strip().splitlines()
        said = lines[-1] if lines else f"exit code {probe.returncode}"
    return said
