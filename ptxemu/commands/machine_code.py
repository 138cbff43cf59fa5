"""Machine code of a kernel beside its PTX: the cubin that the DSL left, or what ptxas makes; SASS
where nvdisasm is found. Of launches that fail both are kept, see `keeping`."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ptxemu.check.text import keep
from ptxemu.errors import LimitExceeded
from ptxemu.report import LaunchReport

ARCH = "sm_100a"
_PATIENCE = 60  # seconds for a tool
_AT_MOST = 4  # kernels of a script whose machine code is made when they fail


def add_machine_code(ptx: Path, entry: str, cubins: Iterable[tuple[Path, bytes]] = ()) -> list[str]:
    """Write `.cubin` and `.sass` beside a `.ptx`; returns the names of what was written.

    cubins: what the DSL left, one of which may hold the entry.
    """
    cubin, sass = (ptx.with_suffix(f".{kind}") for kind in ("cubin", "sass"))
    marker = f".text.{entry}\0".encode()
    found = next((path for path, code in cubins if marker in code), None)
    if found is not None:
        shutil.copyfile(found, cubin)
    elif not _made("ptxas", f"-arch={_target(ptx)}", ptx, "-o", cubin):
        return []
    listing = _made("nvdisasm", "-c", cubin)
    if listing:
        sass.write_bytes(listing.stdout)
    return [cubin.name] + [sass.name] * bool(listing)


@contextmanager
def keeping() -> Iterator[None]:
    """Within the block the PTX of each kernel is kept whose launch fails or has errors; at the end
    its machine code beside it, and where stands on stderr."""
    from ptxemu.module import launching  # with numpy and every instruction

    kept: dict[Path, str] = {}

    def through(launch: Callable[..., LaunchReport], module: Any) -> Callable[..., LaunchReport]:
        def run(entry: str | None = None, **given: Any) -> LaunchReport:
            wrong = True
            try:
                report = launch(module, entry, **given)
                wrong = bool(report.errors)
                return report
            except LimitExceeded:
                wrong = False
                raise
            finally:
                if wrong:
                    name = module.entry(entry).name
                    path = keep(module.text, name)
                    kept.update({path: name} if path else {})

        return run

    with launching(through):
        try:
            yield
        finally:
            for path, name in [*kept.items()][:_AT_MOST]:
                more = (Path(other).suffix for other in add_machine_code(path, name))
                told = f"kept in {path.parent}: {', '.join([path.name, *more])}"
                print(told, file=sys.stderr, flush=True)


def _target(ptx: Path) -> str:
    found = re.search(r"^\.target\s+(\w+)", ptx.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else ARCH


def _made(tool: str, *arguments: object) -> subprocess.CompletedProcess[bytes] | None:
    """Run a tool of the CUDA toolkit; None if it is missing, fails, or needs too long."""
    path = tool_of_cuda(tool)
    if path is None:
        return None
    words = [path, *map(str, arguments)]
    try:
        done = subprocess.run(words, capture_output=True, check=False, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return None
    return done if done.returncode == 0 else None


def tool_of_cuda(name: str) -> str | None:
    """Path of a tool: on PATH, or of NVIDIA's packages on PyPI."""
    found = shutil.which(name)
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec else None
    for place in places or ():
        for path in sorted(Path(place).glob(f"*/bin/{name}")):
            found = found or str(path)
    return found
