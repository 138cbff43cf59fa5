"""A kernel, and the PTX and SASS that the compiler made of it: files, kinds of instructions."""

from __future__ import annotations

import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cycle_model.sass.flow import SPILLS, Kinds, kind_of
from cycle_model.sass.tools import disassemble, read
from kernelkit.compile.kernel import CompiledKernel
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.warm import ready
from lab.tools.common import changed, describe

PTX_INSTRUCTION = re.compile(r"^\s+(?:@!?%\w+\s+)?([a-z][\w.:]*)[^;]*;")
SASS_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")

PTX_KINDS: Kinds = {
    "tensor core": ("tcgen05.mma", "tcgen05.cp", "tcgen05.shift"),
    "tensor memory": ("tcgen05.",),
    "mma.sync": ("mma.",),
    "ldmatrix": ("ldmatrix",),
    "movmatrix": ("movmatrix",),
    "TMA and bulk copies": ("cp.async.bulk", "cp.reduce"),
    "asynchronous copies": ("cp.async",),
    "barriers and fences": ("mbarrier", "bar.", "barrier", "fence", "membar"),
    "memory": ("ld.", "st.", "atom", "red."),
    "special functions": ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh", "sin", "cos"),
    "conversions": ("cvt",),
    "floating point": ("fma", "add.f", "add.rn", "sub.f", "mul.f", "mul.rn", "max.", "min."),
    "control and selection": ("bra", "setp", "selp", "ret", "elect", "vote", "shfl"),
    "integer and moves": ("",),
}
SASS_KINDS: Kinds = {
    "tensor core": (
        "UTCHMMA",
        "UTCQMMA",
        "UTCOMMA",
        "UTCIMMA",
        "UTCMMA",
        "UTCCP",
        "HGMMA",
        "QGMMA",
    ),
    "tensor memory": ("LDTM", "STTM", "UTCATOMSWS", "UTCBAR", "UTC"),
    "HMMA": ("HMMA",),
    "LDSM": ("LDSM",),
    "MOVM": ("MOVM",),
    "LDGSTS": ("LDGSTS",),
    "TMA and bulk copies": ("UTMA", "UBLKCP", "UBLKRED"),
    "barriers and fences": (
        *("SYNCS", "BAR", "FENCE", "MEMBAR", "WARPSYNC", "UCGABAR", "DEPBAR", "LDGDEPBAR"),
    ),
    "spills": SPILLS,
    "memory": ("LDG", "STG", "LDS", "STS", "LDC", "ULDC", "ATOM", "RED"),
    "special functions": ("MUFU",),
    "conversions": ("F2F", "I2F", "F2I"),
    "floating point": ("FFMA", "FADD", "FMUL", "FMNMX", "FSEL", "FSET", "HFMA", "HADD", "HMUL"),
    "control and selection": ("BRA", "EXIT", "BSSY", "BSYNC", "ISETP", "SEL", "PLOP", "VOTE"),
    "integer and moves": ("",),
}

LONGEST = 150  # characters of a file's name before its ending


def count_kinds(text: str, instruction: re.Pattern, kinds: Kinds) -> Counter:
    """Instructions of a listing by kind, in the order of `kinds`."""
    opcodes = Counter(match[1] for match in map(instruction.match, text.splitlines()) if match)
    counts = Counter(dict.fromkeys(kinds, 0))
    for opcode, count in opcodes.items():
        counts[kind_of(opcode, kinds)] += count
    return counts


def write_to(folder: Path, name: str, compiled: Any) -> tuple[Path, Path]:
    """Write (PTX, cubin) of what `compile_once` returned; `name` becomes that of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^\w.]+", "_", name)
    if len(stem) > LONGEST:  # a config may hold a program
        stem = f"{stem[:LONGEST]}_{zlib.crc32(name.encode()):08x}"
    ptx, cubin = folder / f"{stem}.ptx", folder / f"{stem}.cubin"
    ptx.write_text(compiled.ptx, encoding="utf-8")
    cubin.write_bytes(compiled.cubin)
    return ptx, cubin


def print_ptx(ptx: Path) -> Counter:
    """Print how many instructions of which kind there are; returns them."""
    counts = count_kinds(ptx.read_text(encoding="utf-8"), PTX_INSTRUCTION, PTX_KINDS)
    print_kinds(f"PTX ({ptx})", counts)
    return counts


def print_sass(cubin: Path) -> Counter:
    """Print counts of the SASS, and leave its listing next to the cubin."""
    listing, text = cubin.with_suffix(".sass"), disassemble(cubin)
    listing.write_text(text, encoding="utf-8")
    counts = count_kinds(text, SASS_INSTRUCTION, SASS_KINDS)
    print_kinds(f"SASS ({listing})", counts)
    return counts


def print_kinds(title: str, counts: Mapping[str, float]) -> None:
    """Instructions by kind."""
    print(f"\n{title}: {sum(counts.values()):g} instructions")
    for kind, count in counts.items():
        if count:
            print(f"  {kind:<22}{count:>8.6g}")


@dataclass(frozen=True)
class Subject:
    """A kernel to be dumped. what: description.
    stem: prefix of its files' names, before the config.
    figures: reads the cubin's resources and its main loop.
    show: prints the figures.
    """

    what: str
    stem: str
    config: Any
    arch: str
    compile: Callable[[], CompiledKernel]
    figures: Callable[[Path], dict[str, Any]] = lambda cubin: read(cubin)[0]
    show: Callable[[dict[str, Any]], None] = lambda figures: None

    @property
    def title(self) -> str:
        return f"{self.what} for {self.arch}: {describe(self.config)}"

    def write(self, folder: Path) -> tuple[Path, Path, float]:
        """(PTX, cubin, seconds to find or compile them), files named after the config."""
        start = time.perf_counter()
        compiled = self.compile()
        seconds = time.perf_counter() - start
        stem = f"{self.stem}_{self.arch}_{describe(self.config)}"
        return *write_to(folder, stem, compiled), seconds


def subject_of(key: KernelKey) -> Subject:
    """The kernel with this key; its figures are its resources alone."""
    name = key.source.replace(":", ".")
    return Subject(name, name, key.config, key.arch, compile=partial(ready, key))


# What names a kernel of a grid, and what compiles it into a folder: figures, or a refusal.
Cell = tuple[dict[str, Any], Callable[[Path], dict[str, Any]]]


def timed_cell(subject_of: Callable[[Any], Subject], config: Any, arch: str) -> Cell:
    """The kernel of a config, and how long it takes to compile."""

    def figures(folder: Path) -> dict[str, Any]:
        subject = subject_of(config)
        _, cubin, seconds = subject.write(folder)
        return {"compile_seconds": round(seconds, 2)} | subject.figures(cubin)

    return {"arch": arch, "config": changed(config)}, figures
