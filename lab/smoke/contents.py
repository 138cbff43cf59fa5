"""What a wheel should hold: the Python of the packages, their tables in JSON, a mark that they are
typed, metadata."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

from lab.house.source import OLD_NAMES, PACKAGES, files


def expected() -> set[str]:
    """Names of the files that the wheel installs beside its metadata."""
    installed = {*PACKAGES, *OLD_NAMES}
    ours = {str(path) for path in files(".py", ".json") if path.parts[0] in installed}
    return ours | {f"{package}/py.typed" for package in PACKAGES}


def differences(wheel: Path) -> list[str]:
    """What it lacks and what nobody asked for, a line each."""
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    lacking, foreign = sorted(expected() - names), sorted(names - expected())
    return [f"lacks {name}" for name in lacking] + [f"should not have {name}" for name in foreign]
