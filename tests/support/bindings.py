"""Every kernel that the tests launch, bound to its machine code and modelled: `--bindings FILE`.

A test then records its launches. For each kernel, which is one cubin, every warp of the first
launches is bound and replayed; a kernel that does not bind, or gets stuck, fails its test. All
workers write one line of JSON per kernel to FILE.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ptxemu.report import LaunchReport
from ptxemu.watch import watched

LAUNCHES = 2  # of a kernel that are bound


class Bindings:
    """The plugin; without a file nothing is recorded."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._seen: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Record the launches of a test; a test that reads a launch's options sees `record`,
        too."""
        with watched(record=True) as report:
            result = yield
        for launch in report.launches:
            if launch.recording is not None and launch.recording.cubin and not launch.stopped:
                self._check(item.nodeid, launch)
        return result

    def _check(self, test: str, launch: LaunchReport) -> None:
        kernel = hashlib.sha256(launch.recording.cubin).hexdigest()[:16]
        self._seen[kernel] += 1
        if self._seen[kernel] > LAUNCHES:
            return
        row = {"kernel": kernel, "entry": launch.entry, "test": test, **_bound(launch)}
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
        if "error" in row:
            pytest.fail(f"{launch.entry}: {row['error']}", pytrace=False)


def _bound(launch: LaunchReport) -> dict[str, Any]:
    """Return warps and microseconds, or the error."""
    from cycle_model.gpus import for_arch
    from cycle_model.grid import LaunchModel
    from cycle_model.launch import bind

    began = time.perf_counter()
    try:
        bound = bind(launch.recording)
        warps = [warp for number in bound.clusters for warp in bound.cluster(number)]
        seconds = time.perf_counter() - began
        model = LaunchModel(bound, for_arch(launch.recording.arch))
        return {
            "warps": len(warps),
            "far": max((warp.cost / max(warp.work, 1) for warp in warps), default=0.0),
            "bind_s": round(seconds, 2),
            "us": round(model.predict().microseconds, 2),
            "model_s": round(time.perf_counter() - began - seconds, 2),
        }
    except (ValueError, KeyError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
