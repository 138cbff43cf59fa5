"""Pictures as files: a folder for each, with arrays for numpy and the same as text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from ptxemu.inspect import snapshot
from ptxemu.inspect.snapshot import Register, Snapshot, words_text
from ptxemu.machine.state import POISON_BYTE

_LINE = 32  # bytes of a line of the hex dump


def save(picture: Snapshot, folder: Path) -> Path:
    """Write a picture to a new folder in `folder`, whose path is returned.

    where.txt   who, where, when, the instruction and its operands, histories of watches.
    smem.npy, smem.txt  bytes of shared memory, uint8; in hex, with symbols.
    NAME.npy, NAME.txt  of each tile: its values, unswizzled.
    tmem.npz, tmem.txt  f32 [lane, column], bf16 [lane, 2 * column], cells uint32 [lane, column].
    regs.npz, regs.txt  32 lanes of each register, by PTX name.
    """
    target = _fresh(folder, picture)
    target.mkdir(parents=True)
    _write(target / "where.txt", _where(picture))
    if picture.shared is not None:
        np.save(target / "smem.npy", picture.shared)
        _write(target / "smem.txt", _shared_text(picture, picture.shared))
    for tile in picture.tiles:
        name = re.sub(r"\W+", "_", tile.name)
        np.save(target / f"{name}.npy", tile.values)
        title = f"{tile.name}, {tile.dtype}: {tile.origin}\n{tile.name}"
        _write(target / f"{name}.txt", snapshot.text_of(tile.values, title))
    if picture.tensor is not None:
        views: Any = {dtype: picture.tensor_memory(dtype) for dtype in ("f32", "bf16")}
        np.savez(target / "tmem.npz", cells=picture.tensor.T, **views)
        _write(target / "tmem.txt", _tensor_text(picture, views))
    if picture.registers:
        registers: Any = {name: r.values for name, r in picture.registers.items()}
        np.savez(target / "regs.npz", **registers)
        _write(target / "regs.txt", registers_text(picture))
    return target


def _fresh(folder: Path, picture: Snapshot) -> Path:
    stem = f"cta{picture.cta_index}_warp{picture.warp}_step{picture.step}"
    number = len(list(folder.glob("*_cta*"))) if folder.exists() else 0
    while True:
        found = folder / f"{number:03}_{stem}"
        if not found.exists():
            return found
        number += 1


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def title(picture: Snapshot) -> str:
    """Return one line: the place, the warp and the step."""
    who = f"warp {picture.warp} of cta{picture.cta}".replace(", ", ",")
    return f"{picture.at}: {who} (CTA {picture.cta_index}), step {picture.step}"


def _where(picture: Snapshot) -> str:
    lines = [
        title(picture),
        f"kernel      {picture.entry}",
        f"lanes       {picture.lanes:#010x}",
        f"next        PTX line {picture.instr.line}: {instruction_text(picture)}",
    ]
    if picture.instr.location:
        lines += [f"            {frame}" for frame in picture.instr.location.frames()]
    for name, writes in picture.writes.items():
        lines += ["", f"writes to {name} so far:", *(f"  {write}" for write in writes)]
    return "\n".join(lines) + "\n"


def _shared_text(picture: Snapshot, shared: np.ndarray) -> str:
    """Return symbols, tiles, then bytes in hex; equal lines appear once, poison never."""
    names = sorted((offset, name) for name, offset in picture.symbols.items())
    lines = [f"{offset:#08x}  {name}" for offset, name in names]
    lines += [
        f"{tile.positions.min():#08x}..{tile.positions.max():#08x}  {tile.name}: {tile.origin}"
        for tile in picture.tiles
    ]
    lines += ["", f"32-bit words; poison ({POISON_BYTE:#x}) and repeated lines left out"]
    before = None
    for start in range(0, len(shared), _LINE):
        row = shared[start : start + _LINE]
        same = before is not None and np.array_equal(row, before)
        before = row
        if same or (row == POISON_BYTE).all():
            continue
        if len(row) % 4:
            lines.append(f"{start:#08x}  bytes {row.tobytes().hex(' ')}")
        else:
            words = " ".join(f"{word:08x}" for word in row.view("<u4").tolist())
            lines.append(f"{start:#08x}  {words}")
    return "\n".join(lines) + "\n"


def _tensor_text(picture: Snapshot, views: dict[str, np.ndarray]) -> str:
    """Columns that are allocated, as fp32 and as bf16."""
    if not picture.allocations:
        return "no column is allocated\n"
    parts = []
    for column, count in sorted(picture.allocations.items()):
        last = column + count
        f32, bf16 = views["f32"][:, column:last], views["bf16"][:, 2 * column : 2 * last]
        name = f"columns {column}..{last - 1}, rows are lanes,"
        parts += [snapshot.text_of(f32, f"{name} f32"), snapshot.text_of(bf16, f"{name} bf16")]
    return "\n".join(parts)


def instruction_text(picture: Snapshot) -> str:
    """Return the instruction in one line, without tabs."""
    return " ".join(picture.instr.text.split())


def registers_text(picture: Snapshot) -> str:
    """The instruction's operands first, then the other live registers."""
    lines = [instruction_text(picture), "", "operands"]
    lines += [_register(picture.registers[name]) for name in picture.operands]
    rest = [r for name, r in picture.registers.items() if name not in picture.operands]
    return "\n".join([*lines, "", "live", *map(_register, rest)]) + "\n"


def _register(register: Register) -> str:
    bits = register.bits
    agree = bool((bits == bits[0]).all())
    shown = bits[:1] if agree else bits
    text = " ".join(_hex(value) for value in shown) if bits.ndim > 1 else words_text(shown)
    return f"  {register.name:<8} {register.declared:<5} {'all ' if agree else ''}{text}"


def _hex(value: np.ndarray) -> str:
    return ":".join(f"{int(word):#x}" for word in np.atleast_1d(value))
