"""What a user wants to see: stops, regions, watches; as dataclasses, and from words of a command.

All are frozen, so that they can be part of `Options` and of the key of a compiled kernel.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ptxemu.condition import Condition
from ptxemu.host_tensor import HostTensor
from ptxemu.numerics import swizzle as swizzles
from ptxemu.numerics.formats import ELEMENTS, TENSOR_COLUMNS

KINDS = ("smem", "tmem", "regs")
SPACES = {"global": "global", "smem": "shared", "shared": "shared", "tmem": "tensor"}
CtaName = int | tuple[int, int, int] | None  # linear index in the grid, x fastest, or coordinates


@dataclass(frozen=True)
class Region:
    """A matrix in shared memory that the user knows the layout of.

    start       byte offset in the CTA's shared memory, as addresses of the PTX have it.
    rows, columns  of elements; a row is contiguous but for the swizzle.
    dtype       key of `layouts.ELEMENTS`: f32, bf16, e4m3, u8, ...
    swizzle     key of `machine.swizzle.BY_NAME`. Where a row is longer than the span of the swizzle
                (128 bytes of "128B"), blocks of so many bytes of all rows lie one behind the other,
                as boxes of TMA do.
    Raises ValueError for names that are not known.
    """

    name: str
    start: int
    rows: int
    columns: int
    dtype: str
    swizzle: str = "none"

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, ELEMENTS)
        _one_of("swizzle", self.swizzle, swizzles.BY_NAME)
        if self.start < 0 or self.rows < 1 or self.columns < 1:
            raise ValueError(f"region {self.name}: offset >= 0, rows and columns >= 1 are needed")

    @classmethod
    def parse(cls, text: str) -> Region:
        """From "name=offset,rows,columns,dtype[,swizzle]"; numbers as in Python."""
        name, equals, rest = text.partition("=")
        words = [word.strip() for word in rest.split(",")]
        if not equals or not name.strip() or not 4 <= len(words) <= 5:
            raise ValueError(f"{text!r} is not name=offset,rows,columns,dtype[,swizzle]")
        start, rows, columns = (_number(word, text) for word in words[:3])
        return cls(name.strip(), start, rows, columns, *words[3:])


@dataclass(frozen=True)
class Stop:
    """Take a picture whenever a warp comes to a line.

    at          "file.py:257" (the end of a path is enough), of the kernel or of what it inlines; or
                "ptx:120", a line of the PTX text.
    dump        which of KINDS.
    cta, warp   of whom; None: of all.
    when        a condition, see `condition.Condition`; `step` counts the warp's arrivals from 0.
    regions     matrices in shared memory; tiles that TMA moves are found without being named.
    limit       pictures of one launch; arrivals beyond it are counted and said.
    Raises ValueError for what cannot be meant.
    """

    at: str
    dump: tuple[str, ...] = KINDS
    cta: CtaName = None
    warp: int | None = None
    when: str = ""
    regions: tuple[Region, ...] = ()
    limit: int = 16

    def __post_init__(self) -> None:
        if not re.fullmatch(r".+:\d+", self.at):
            raise ValueError(f"at={self.at!r}; must be file.py:LINE or ptx:LINE")
        if not self.dump:
            raise ValueError(f"dump is empty; must be some of {', '.join(KINDS)}")
        for kind in self.dump:
            _one_of("dump", kind, KINDS)
        if self.limit < 1:
            raise ValueError(f"limit={self.limit}; must be >= 1")
        Condition(self.when)


@dataclass(frozen=True)
class Watch:
    """Remember who wrote to a range, in order.

    space       "global", "shared" or "tensor".
    first, count  address and bytes; offset and bytes; column and columns.
    cta         whose shared or tensor memory; None: every CTA's, each with a history of its own.
    parameter   of global memory: `first` counts from the pointer at the start of that kernel
                parameter (of a tensor map: from its tensor).
    name        for reports.
    """

    space: str
    first: int
    count: int
    cta: CtaName = None
    parameter: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        _one_of("space", self.space, ("global", "shared", "tensor"))
        if self.first < 0 or self.count < 1:
            raise ValueError(f"watch of {self.count} at {self.first}; at least one, from 0 on")
        if self.space == "tensor" and self.first + self.count > TENSOR_COLUMNS:
            raise ValueError(
                f"watch of columns up to {self.first + self.count}; limit {TENSOR_COLUMNS}"
            )

    @property
    def title(self) -> str:
        """The name, or the range in words."""
        last = self.first + self.count - 1
        if self.space == "tensor":
            return self.name or f"TMEM columns {self.first}..{last}"
        where = "" if self.parameter is None else f" of parameter {self.parameter}"
        return self.name or f"{self.space} memory {self.first:#x}..{last:#x}{where}"

    @classmethod
    def tensor(cls, tensor: Any, name: str = "") -> Watch:
        """From the first to the last byte of a torch tensor or numpy array, which may be a view."""
        found = HostTensor(tensor)
        return cls("global", found.address, found.extent, name=name)

    @classmethod
    def parse(cls, text: str) -> Watch:
        """From "SPACE:FIRST+COUNT[@CTA]"; SPACE is global, smem, tmem or param0, param1, ..."""
        found = re.fullmatch(r"(\w+?)(\d*):(\w+)\+(\w+)(?:@([\d,]+))?", text.strip())
        if (
            not found
            or found[1] not in (*SPACES, "param")
            or (found[1] == "param") != bool(found[2])
        ):
            raise ValueError(
                f"{text!r} is not SPACE:FIRST+COUNT[@CTA], SPACE global, smem, tmem or param<N>"
            )
        return cls(
            SPACES.get(found[1], "global"),
            _number(found[3], text),
            _number(found[4], text),
            cta=None if found[5] is None else parse_cta(found[5]),
            parameter=int(found[2]) if found[2] else None,
        )


@dataclass(frozen=True)
class Inspect:
    """What to look at in each launch; all of it may be empty.

    stops       pictures at lines. watches: histories of ranges, the `keep` newest writes of each.
    last        so many of the last events are kept, and printed if the launch fails.
    folder      where pictures are written as files; "": they are only in the report.
    quiet       print nothing; else histories, and events of a failed launch, go to stderr.
    """

    stops: tuple[Stop, ...] = ()
    watches: tuple[Watch, ...] = ()
    keep: int = 20
    last: int = 0
    folder: str = ""
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.keep < 1 or self.last < 0:
            raise ValueError(f"keep={self.keep}, last={self.last}; must be >= 1 and >= 0")


def parse_cta(text: str) -> int | tuple[int, int, int]:
    """From "3", the index in the grid, or "x,y,z", of which z may be missing."""
    words = text.split(",")
    if not all(word.strip().isdigit() for word in words) or len(words) > 3:
        raise ValueError(f"cta {text!r}; must be an index, or coordinates x,y,z")
    if len(words) == 1:
        return int(words[0])
    x, y, z = (*map(int, words), *(0,) * (3 - len(words)))
    return x, y, z


def _number(word: str, text: str) -> int:
    try:
        return int(word, 0)
    except ValueError:
        raise ValueError(f"{word!r} in {text!r} is not a number") from None


def _one_of(what: str, name: str, known: Any) -> None:
    if name not in known:
        raise ValueError(f"{what} {name!r}; must be one of {', '.join(known)}")
