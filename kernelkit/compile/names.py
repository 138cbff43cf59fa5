"""Names of kernels in profilers, by their config: `gqa_decode_sm90_d128_bf16_g8_page64`.

A config class may have `label`: the begin of the name, and the fields that it always includes. All
other fields that differ from their default follow, in the order of the fields.

ptxas generates different machine code for a kernel whose name has the word `cutlass`
(notes/compilers.md), and the DSL's names have it. So our names end with it, unless a config has a
`cutlass_word` that is False.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from typing import Any

from kernelkit.compile.keys import KernelKey

LONGEST = 100  # characters, the last word aside
# Prefixes of numbers, instead of the name of the field.
SHORT = {
    "experts": "e", "group": "g", "head_dim": "d", "hidden": "h", "page_size": "page",
    "tile_m": "m", "tile_n": "n", "tile_rows": "m", "top_k": "k", "v_head_dim": "dv",
}  # fmt: skip
ONES = ("n_group", "topk_group")  # left out if they are 1
# Fields whose values need no name; the values of other fields follow their name.
PLAIN = (
    "adding", "dtype", "dtypes", "fmt", "instructions", "layout", "record", "scaling", "schedule",
    "scoring",
)  # fmt: skip
PROGRAMS = ("mask_mod", "score_mod")  # texts, named by a digest
_SILENT = re.compile(r"_?kernel$|^signature$|^sm\d+$|^host_function(_of_)?")


def kernel_name(key: KernelKey) -> str:
    """Letters, digits and underscores; other configs may have the same one."""
    first, *always = getattr(type(key.config), "label", (_stem(key.source),))
    name = f"{first}_{re.sub('_|[a-z]$', '', key.arch)}"
    for word in _words(key.config, tuple(always)):
        longer = f"{name}_{word}"
        if len(longer) > LONGEST:
            break
        name = longer
    return f"{name}_cutlass" if getattr(key.config, "cutlass_word", True) else name


def stem_of(name: str) -> str | None:
    """Return the part of a name before the architecture; None for a kernel that is not ours."""
    found = re.match(r"(\w+?)_sm\d{2,3}(_|$)", name)
    return found[1] if found else None


def _stem(source: str) -> str:
    """Name a kernel's module: moe.routing.topk_kernel is moe_routing_topk."""
    parts = (_SILENT.sub("", part) for part in re.split("[.:]", source))
    return "_".join(part for part in parts if part)


def _words(config: Any, always: tuple[str, ...]) -> list[str]:
    """Return the words of the fields, those of `always` first."""
    fields = {field.name: field for field in dataclasses.fields(config)}
    others = [
        name
        for name, field in fields.items()
        if name not in always and getattr(config, name) != field.default
    ]
    found = []
    for name in (*always, *others):
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            found += _words(value, getattr(type(value), "label", ("",))[1:])
        elif word := _word(name, value):
            found.append(re.sub(r"\W+", "_", word))
    return found


def _word(name: str, value: Any) -> str:
    """Return a field's word; '' for None, and for False without a default."""
    if value is None or value is False or (name in ONES and value == 1):
        return ""
    if value is True:
        return name
    if name in PROGRAMS and value:
        return f"{name}_{zlib.crc32(value.encode()):08x}"
    if isinstance(value, tuple):
        value = "_".join(map(str, value))
    if isinstance(value, str):
        return value if name in PLAIN else f"{name.removesuffix('_dtype')}_{value}"
    return f"{SHORT.get(name, name)}{value}"
