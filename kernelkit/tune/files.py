"""Files of measured choices: where they are, for which GPU, driver and kernels each of them holds.

    <folder of the cache>/tuned/<operator>-<GPU>-<SMs>-<driver>-<sources>.json    of the user
    kernelkit/tune/tables/*.json                                                  of the package

A file says in its header what it holds for; one with another header than its place asks for is not
used. Those of the package hold for every driver, and stand behind those of the user. Files appear
whole, by renaming, and what processes write at the same time is merged under a lock. A damaged file
is set aside and said.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kernelkit.compile import sources, store
from kernelkit.compile.arch import ARCH_OF_CAPABILITY, written_for
from kernelkit.compile.outside import json_file, require_fields

if TYPE_CHECKING:
    import torch

FORMAT = 1
FOLDER = "tuned"
SHIPPED = Path(__file__).resolve().parent / "tables"
_PATIENCE = 60  # seconds to wait for another process that writes the same file


Choice = Mapping[str, Any]  # option -> value


class TunedWarning(UserWarning):
    """A measured choice, or a file of them, is of no use here; the rules choose instead."""


class Measured(Protocol):
    """Measured operator, `kernelkit.tune.choices.Tuned`.

    kernels: architecture -> modules of kernels
    """

    name: str
    kernels: Mapping[str, Sequence[str]]


class TableError(ValueError):
    """A file of measured choices that is damaged; the message says how."""


@dataclass(frozen=True)
class Machine:
    """Machine on which a time was measured.

    gpu: name of the GPU
    sms: number of its SMs
    arch: architecture that is compiled for it
    driver: version of the driver, '' if unknown
    """

    gpu: str
    sms: int
    arch: str
    driver: str = ""


@dataclass(frozen=True)
class Place:
    """Scope of a file; sources: a fingerprint of all sources of the kernels."""

    operator: str
    machine: Machine
    sources: str

    @property
    def file_name(self) -> str:
        """Name of the user's file."""
        machine = self.machine
        words = self.operator, machine.gpu, str(machine.sms), machine.driver, self.sources[:12]
        return "-".join(re.sub(r"[^\w.]+", "_", word) for word in words) + ".json"

    def header(self) -> dict[str, Any]:
        """Return the header of the file."""
        fields = {"operator": self.operator, **asdict(self.machine), "sources": self.sources}
        return {"format": FORMAT, **fields}

    def as_shipped(self, header: Mapping[str, Any]) -> Place:
        """Return the place with the driver and the sources of a header: for files valid for any of
        these."""
        machine = replace(self.machine, driver=str(header.get("driver")))
        return replace(self, machine=machine, sources=str(header.get("sources")))


@dataclass(frozen=True)
class Entry:
    """A measurement.

    problem: problem as `kernelkit.tune.choices.described` returns it
    choice: the fastest options
    us, default_us: microseconds of a cold call with them, and with the rules' choice
    candidates: pairs of a choice and its microseconds
    when: seconds since 1970
    """

    problem: dict[str, Any]
    choice: dict[str, Any]
    us: float
    default_us: float
    candidates: tuple[tuple[dict[str, Any], float], ...] = ()
    when: float = 0.0

    @property
    def text(self) -> str:
        """Text of the problem, as `kernelkit.tune.choices.text_of` returns it."""
        return json.dumps(self.problem, sort_keys=True)


# ---- what holds here


def machine_of(device: torch.device) -> Machine:
    """Describe a CUDA device; NotImplementedError for a GPU that no kernel is written for."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    if capability not in ARCH_OF_CAPABILITY:
        raise NotImplementedError(f"{device} has compute capability {capability}")
    arch = ARCH_OF_CAPABILITY[capability]
    return Machine(properties.name, properties.multi_processor_count, arch, driver_version())


@cache
def driver_version() -> str:
    """Return the version of NVIDIA's driver, such as '570.86.15'; '' if unknown."""
    try:
        from cuda.bindings import nvml

        nvml.init_v2()
        return str(nvml.system_get_driver_version())
    except Exception:  # noqa: BLE001  of a package that may be too old for it, or a machine without
        pass
    with contextlib.suppress(OSError):
        said = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", said)
        return found[0] if found else ""
    return ""


def place_of(tuned: Measured, machine: Machine) -> Place:
    """Return the scope of an operator's choices. NotImplementedError without a kernel for it."""
    modules = tuned.kernels.get(machine.arch) or tuned.kernels.get(written_for(machine.arch))
    if modules is None:
        raise NotImplementedError(f"{tuned.name} is written for {[*tuned.kernels]}")
    digest = hashlib.sha256("".join(map(sources.fingerprint, modules)).encode())
    return Place(tuned.name, machine, digest.hexdigest())


def choices_here(tuned: Measured, device: torch.device) -> dict[str, Choice]:
    """`text_of` a problem -> its choice, of all files that hold on a device; none of a device that
    is not there, as fake tensors name one. Where there is no file of the operator, nothing is asked
    of the device."""
    import torch

    folder = folder_of_user()
    own = any(_files(folder, tuned.name)) if folder else False
    if not own and not any(_files(SHIPPED, tuned.name)):
        return {}
    if not torch.cuda.is_available():
        return {}
    place = place_of(tuned, machine_of(device))
    found = shipped(place)
    if folder is not None and place.machine.driver:  # else another driver may have been measured
        found |= load(folder, place)
    return {text: entry.choice for text, entry in found.items()}


def folder_of_user() -> Path | None:
    """None where the cache is switched off."""
    kept = store.from_environment()
    return None if kept is None else kept.folder / FOLDER


def _files(folder: Path, operator: str) -> Iterator[Path]:
    """Return the files of an operator, perhaps with those of longer names; see their headers."""
    return folder.glob(f"{operator}-*.json")


def shipped(place: Place) -> dict[str, Entry]:
    """Return the package's measurements for this GPU, for any driver and any version of the
    kernels. The rules were measured on earlier versions, too."""
    found: dict[str, Entry] = {}
    for path in sorted(_files(SHIPPED, place.operator)):
        try:
            header, entries = read(path)
        except (TableError, OSError) as error:
            _warn(str(error))
            continue
        if header == place.as_shipped(header).header():
            found |= {entry.text: entry for entry in entries}
    return found


# ---- reading and writing


def load(folder: Path, place: Place) -> dict[str, Entry]:
    """The user's entries of a place by the text of their problem. What cannot be used is warned of:
    a damaged file, which is set aside, and one that says it belongs elsewhere."""
    path = folder / place.file_name
    try:
        store.GUARD.check(path)
        header, entries = read(path)
    except FileNotFoundError:
        return {}
    except TableError as error:
        _set_aside(path, str(error))
        return {}
    except OSError as error:
        _warn(f"{path} cannot be read: {error}")
        return {}
    if header != place.header():
        _warn(f"{path} is not used: it was made for {header}, here is {place.header()}")
        return {}
    return {entry.text: entry for entry in entries}


def read(path: Path) -> tuple[dict[str, Any], list[Entry]]:
    """(header, entries). TableError for a damaged file, OSError for one that cannot be read."""
    try:
        content = json_file(path)
        require_fields("it", content, {"header": dict, "entries": list})
        header, found = content["header"], [_entry(item) for item in content["entries"]]
    except (ValueError, TypeError) as error:
        raise TableError(f"{path} is damaged: {type(error).__name__} {error}") from error
    return header, found


def _entry(item: Any) -> Entry:
    number = int, float
    require_fields("an entry", item, {"problem": dict, "choice": dict, "candidates": list})
    require_fields("an entry", item, {"us": number, "default_us": number, "when": number})
    candidates = tuple((choice, us) for choice, us in item["candidates"])
    for choice, us in candidates:
        require_fields("a candidate", {"choice": choice, "us": us}, {"choice": dict, "us": number})
    times = [item["us"], item["default_us"], item["when"], *(us for _, us in candidates)]
    if not all(0 <= time < math.inf for time in times):
        raise ValueError(f"times are {times!r:.80}, expected numbers from 0 on")
    return Entry(**item | {"candidates": candidates})


def add(folder: Path, place: Place, entries: Iterable[Entry]) -> Path:
    """Put measurements into the user's file of a place, beside those that it has; one of the same
    problem is replaced. OSError where it cannot be written, ValueError without a known driver."""
    from filelock import FileLock

    if not place.machine.driver:
        raise ValueError("the driver version is unknown: measurements are not kept without it")
    path = folder / place.file_name
    store.GUARD.make(path.parent)
    with FileLock(path.with_suffix(".lock"), timeout=_PATIENCE):
        store.sweep(folder.glob(f"{store.UNFINISHED}*"))
        known = load(folder, place)
        if not known and path.exists():  # of another place: nothing of it may be lost
            _set_aside(path, "is in the place of another file")
        known |= {entry.text: entry for entry in entries}
        content = {"header": place.header(), "entries": [asdict(each) for each in known.values()]}
        store.write_whole(path, json.dumps(content, indent=1).encode(), lasting=True)
    return path


def _set_aside(path: Path, why: str) -> None:
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    with contextlib.suppress(OSError):
        path.rename(aside)
    _warn(f"{why}; it is {aside.name} now")


def _warn(message: str) -> None:
    warnings.warn(f"measured choices: {message}", TunedWarning, stacklevel=3)
