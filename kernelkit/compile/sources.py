"""Fingerprint of the source files that a kernel is traced from, without imports.

A kernel is a function of its config and of the modules that its own module imports, directly or
not. Imports are found in the text, including those inside functions.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Packages that kernels are traced from; ptxemu is none.
PACKAGES = ("examples", "fmha", "gqa_lowlatency", "kernelkit", "kvcache", "mla", "moe", "q8_0")

_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n]+)|import[ \t]+([^\n]+))", re.M
)
_NAME = re.compile(r"[\w.]+")


@cache
def fingerprint(module: str) -> str:
    """Return a fingerprint of the files of `closure(module)`, as hexadecimal digits."""
    digest = hashlib.sha256()
    for name in closure(module):
        content = path_of(name).read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


@cache
def closure(module: str) -> tuple[str, ...]:
    """`module` and all modules of ours that it reaches by imports, sorted.

    The `__init__` of a package on the way counts only where a name is imported from it. ValueError
    for a module that is not ours.
    """
    if path_of(module) is None:
        raise ValueError(f"{module} is not a module of {PACKAGES}")
    reached, waiting = {module}, [module]
    while waiting:
        new = set(_imports(waiting.pop())) - reached
        reached |= new
        waiting += new
    return tuple(sorted(reached))


@cache
def path_of(module: str) -> Path | None:
    """The file of a module of ours, None for another's or where there is no such module."""
    parts = module.split(".")
    if parts[0] not in PACKAGES:
        return None
    base = ROOT.joinpath(*parts)
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


@cache
def _imports(module: str) -> tuple[str, ...]:
    # A comment between the names could hold a parenthesis.
    text = re.sub(r"#[^\n]*", "", path_of(module).read_text(encoding="utf-8"))
    found = []
    for origin, names, plain in _IMPORT.findall(text):
        if origin.startswith("."):
            raise ValueError(f"{module} has relative imports, which fingerprints do not follow")
        found += _NAME.findall(plain)
        for name in _NAME.findall(names) if origin else ():
            inner = f"{origin}.{name}"
            found.append(inner if path_of(inner) else origin)
    return tuple(name for name in found if path_of(name))
