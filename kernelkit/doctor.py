"""Report of installed packages, cached kernels, and where each operator will run.

`kernelkit.call.launch.choose_target` decides where an operator runs, as in every call.
Nothing is compiled, launched or changed. A machine without a GPU or without the DSL is not an
error; a missing required package and a damaged file are.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from kernelkit.compile import aot, store
from kernelkit.compile.artifact import Artifact, ArtifactError
from kernelkit.compile.version import __version__
from kernelkit.tune import files as tuned_files

NEEDED = ("torch", "numpy", "filelock", "platformdirs")
OTHERS = ("nvidia-cutlass-dsl", "cuda-python", "llvmlite", "apache-tvm-ffi")
DSL = OTHERS[0]
PREFIXES = ("BLACKWELL_KERNELS_", "PTXEMU_")
GIGA = 2**30
# Public function -> where the architectures are that it is written for; some have kernels of their
# own for several, by what they are given.
OPERATORS = {
    "fmha.attention": "fmha.launch:ARCHS",
    "fmha.merge": "kernelkit.merge.launch:ARCHS",
    "mla compressors": "mla.compressor.launch:ARCHS",
    "mla indexer": "mla.indexer.scores_launch:ARCHS",
    "gqa_lowlatency.decode": "gqa_lowlatency.launch:ARCHS",
    "kvcache appends and copies": "kvcache.movement.launch:ARCHS",
    "moe.route": "moe.routing.launch:ARCHS",
    "moe.quantise": "moe.quantiser.launch:ARCHS",
    "moe.grouped_gemm, fused_moe with packed experts": "moe.launch:ARCHS",
    "moe.mixed_gemm, fused_moe with arranged experts": "moe.mixed.config:ARCHS",
    "q8_0.matvec": "q8_0.launch:ARCHS",
    "q8_0.product": "q8_0.product.launch:ARCHS",
    "q8_0.product_of_numbers": "q8_0.numbers.choose:ARCHS",
}


def report() -> dict[str, Any]:
    """Return the report as plain values; `problems` lists what is broken."""
    found: dict[str, Any] = {"version": __version__}
    found |= {"python": platform.python_version(), "platform": platform.platform()}
    found["packages"] = {name: version_of(name) for name in (*NEEDED, *OTHERS)}
    problems = [f"{name} is missing" for name in NEEDED if found["packages"][name] is None]
    found["environment"] = {n: v for n, v in sorted(os.environ.items()) if n.startswith(PREFIXES)}
    if not problems:
        found["driver"] = tuned_files.driver_version() or None
        found["gpus"] = gpus()
        caches, damaged = cache_report()
        found["caches"] = caches
        found["tables"], torn = tables()
        found["operators"] = operators()
        problems += damaged + torn
    found["compiling"] = found["packages"][DSL] is not None
    found["problems"] = problems
    return found


@cache
def version_of(package: str) -> str | None:
    """Return the installed version of a package, None without one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def gpus() -> list[dict[str, Any]]:
    """List the GPUs that torch finds."""
    import torch

    from kernelkit.compile.arch import ARCH_OF_CAPABILITY

    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        of = torch.cuda.get_device_properties(index)
        found.append({
            "device": f"cuda:{index}", "name": of.name, "capability": f"{of.major}.{of.minor}",
            "arch": ARCH_OF_CAPABILITY.get((of.major, of.minor)),
            "sms": of.multi_processor_count, "memory_bytes": of.total_memory,
            "cuda_of_torch": torch.version.cuda,
        })  # fmt: skip
    return found


def operators() -> list[dict[str, str]]:
    """List each operator's backend by device: 'native' or 'emulated' with the architecture, or the
    reason of refusal."""
    import torch

    devices = [torch.device("cpu"), *(torch.device(gpu["device"]) for gpu in gpus())]
    return [
        {"operator": name, **{str(device): _place(source, device) for device in devices}}
        for name, source in OPERATORS.items()
    ]


def _place(source: str, device: Any) -> str:
    """Return where the operator with the architectures at `source` runs."""
    from kernelkit.call.launch import choose_target

    module, _, name = source.partition(":")
    try:
        target = choose_target(device, "auto", None, getattr(import_module(module), name))
    except (ValueError, NotImplementedError) as error:
        return f"refused: {error}"
    return f"{'native' if target.backend == 'cuda' else 'emulated'}, {target.arch}"


# ---- folders


def cache_report() -> tuple[dict[str, Any], list[str]]:
    """Folders with their files and bytes, and what is damaged in them."""
    from platformdirs import user_cache_path

    kept = store.from_environment()
    found: dict[str, Any] = {"kernels": None, "measured choices": None}
    damaged = []
    if kept is not None:
        entries = kept.entries()
        nbytes = sum(entry.nbytes for entry in entries)
        found["kernels"] = _folder(kept.folder, len(entries), nbytes) | {"limit": kept.limit}
        damaged = [path for entry in entries if (path := _damaged(entry.path))]
        try:
            store.GUARD.check(kept.folder)
        except OSError as error:
            damaged += [] if isinstance(error, FileNotFoundError) else [str(error)]
        found["measured choices"] = _sizes(kept.folder / tuned_files.FOLDER, "*.json")
    named = os.environ.get("PTXEMU_CACHE", "")
    if named.lower() not in store.OFF:
        emulator = Path(named).expanduser() if named else user_cache_path("ptxemu") / "programs"
        found["emulator"] = _sizes(emulator, "**/*")
    for folder in filter(None, os.environ.get(aot.VARIABLE, "").split(":")):
        found[f"ahead of time, {folder}"] = _sizes(Path(folder), "*.kernel")
        try:
            aot.read_manifest(Path(folder))
        except (aot.AotError, OSError) as error:
            damaged.append(str(error))
    return found, damaged


def _damaged(path: Path) -> str:
    """Why a kernel of the cache is of no use; '' where it is whole."""
    if path.suffix != ".kernel":
        return ""
    try:
        Artifact.from_bytes(path.read_bytes())
    except (ArtifactError, OSError) as error:
        return f"{path} is {error}"
    return ""


def _sizes(folder: Path, pattern: str) -> dict[str, Any]:
    sizes = [path.stat().st_size for path in folder.glob(pattern) if path.is_file()]
    return _folder(folder, len(sizes), sum(sizes))


def _folder(folder: Path, files: int, nbytes: int) -> dict[str, Any]:
    return {"folder": str(folder), "files": files, "bytes": nbytes}


def tables() -> tuple[list[dict[str, Any]], list[str]]:
    """Files of measured choices with how many problems they have and whether they hold on a GPU
    here, and those that are damaged."""
    found, damaged = [], []
    user = tuned_files.folder_of_user()
    for folder in (user, tuned_files.SHIPPED):
        for path in sorted(folder.glob("*.json")) if folder else ():
            row: dict[str, Any] = {"file": str(path)}
            try:
                header, entries = tuned_files.read(path)
            except (tuned_files.TableError, OSError) as error:
                damaged.append(str(error))
                row["holds"] = "damaged"
            else:
                row |= {"problems": len(entries), **header}
                row["holds"] = _holds(header, shipped=folder is tuned_files.SHIPPED)
            found.append(row)
    return found, damaged


def _holds(header: dict[str, Any], *, shipped: bool) -> str:
    """'cuda:0' and so on, or why on no GPU."""
    import torch

    from kernelkit.tune.tuner import SUBJECTS, subject

    if header.get("operator") not in SUBJECTS:
        return f"nowhere: no operator {header.get('operator')!r} here"
    tuned, reasons = subject(header["operator"]).tuned, ["there is no GPU"]
    for gpu in gpus():
        device = torch.device(gpu["device"])
        try:
            place = tuned_files.place_of(tuned, tuned_files.machine_of(device))
        except NotImplementedError as error:
            reasons = [str(error)]
            continue
        if header == place.header():
            return str(device)
        if shipped and header == place.as_shipped(header).header():
            names = [n for n in ("driver", "sources") if header[n] != place.header()[n]]
            return f"{device}, measured with another version of {' and '.join(names)}"
        here = place.header()
        reasons = [f"another {name}" for name in here if here[name] != header.get(name)]
    return f"nowhere: {', '.join(reasons)}"


# ---- for people


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the report in words, our own version first."""
    yield f"blackwell-kernels {found['version']}"
    yield f"Python {found['python']}, {found['platform']}"
    for name, version in found["packages"].items():
        yield f"  {name} {version or 'is not installed'}"
    if not found["compiling"]:
        yield f"{DSL} is missing, so nothing can be compiled: kernels come from the cache, or"
        yield f"from the folders of {aot.VARIABLE}."
    yield "Environment:"
    yield from (f"  {name}={value}" for name, value in found["environment"].items())
    if not found["environment"]:
        yield "  none is set"
    if "gpus" in found:
        yield from _machine_lines(found)
    yield from (f"BROKEN: {problem}" for problem in found["problems"])


def _machine_lines(found: dict[str, Any]) -> Iterator[str]:
    """Describe the machine if no package is missing."""
    yield f"Driver: {found['driver'] or 'none found'}"
    for gpu in found["gpus"]:
        memory = f"{gpu['memory_bytes'] / GIGA:.0f} GB"
        code = gpu["arch"] or "not supported"
        yield (f"  {gpu['device']} {gpu['name']}, compute capability {gpu['capability']} ({code}), "
               f"{gpu['sms']} SMs, {memory}, CUDA {gpu['cuda_of_torch']} of torch")  # fmt: skip
    if not found["gpus"]:
        yield "  torch sees no CUDA GPU: kernels on CPU tensors run in the emulator"
    yield "Caches:"
    for name, cached in found["caches"].items():
        yield f"  {name}: " + (_size(cached) if cached else f"off ({store.VARIABLE})")
    yield "Measured choices:"
    for row in found["tables"]:
        yield f"  {Path(row['file']).name}: {row.get('problems', 0)} problems, holds {row['holds']}"
    if not found["tables"]:
        yield "  none: the rules choose (python -m kernelkit tune)"
    yield "Operators:"
    yield from _grid([list(row.values()) for row in found["operators"]])


def _size(cached: dict[str, Any]) -> str:
    return f"{cached['files']} files, {cached['bytes'] / 2**20:.1f} MB in {cached['folder']}"


def _grid(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Align rows in columns; the last column may be long."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  " + "  ".join(cells).rstrip()


def main(as_json: bool) -> int:
    """Print it; exit code 1 where something is broken."""
    import json

    found = report()
    text = json.dumps(found, indent=1) if as_json else "\n".join(lines(found))
    print(text, file=sys.stdout)
    return 1 if found["problems"] else 0
