"""What the host checks before a launch: tables of angles, and memory that may not overlap."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernelkit.call.tensors import has_whole_rows, require_table, require_tma
from kvcache.layouts.latent import ROPE
from kvcache.layouts.rows import NO_ENTRY, Rows, check_range

# ---- Angles of tokens


def check_rope(positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, tokens: int) -> None:
    """Refuse, by ValueError, what is no table of angles, or no positions of `tokens` tokens."""
    require_table("positions", positions, torch.int64, (tokens,))
    check_angles(cos, sin)
    if tokens and not len(cos):
        raise ValueError(f"cos has shape {tuple(cos.shape)}: a row for every position")


def check_angles(cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Refuse, by ValueError, what are no tables of cosines and sines of the same positions."""
    require_table("cos", cos, torch.float32, (None, ROPE // 2))
    require_table("sin", sin, torch.float32, (len(cos), ROPE // 2))
    require_tma("cos", cos)
    require_tma("sin", sin)


def check_positions(positions: torch.Tensor, angles: int) -> None:
    """Refuse, by ValueError, a position that the tables do not have; on the CPU alone."""
    check_range("positions", positions, (0, angles), f"the tables have 0 to {angles - 1}")


# ---- What is written, no other part of the same launch may read or write: memory that overlaps, by
# addresses, and numbers that occur twice, by what tables on the CPU hold


@dataclass(frozen=True)
class Spans:
    """`count` pieces of `size` bytes, one every `stride` bytes from `begin` on."""

    begin: int
    stride: int
    count: int
    size: int

    @property
    def end(self) -> int:
        """Behind the last piece."""
        return self.begin + (self.count - 1) * self.stride + self.size

    @property
    def begins(self) -> np.ndarray:
        """int64 [count]."""
        return self.begin + np.arange(self.count, dtype=np.int64) * self.stride


def spans_of(tensor: torch.Tensor) -> Spans:
    """Of the first dimension of a tensor whose others lie in one piece, or all of it as one."""
    if not tensor.numel() or tensor.device.type == "meta":
        return Spans(0, 0, 0, 0)
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    size = tensor.itemsize * (1 + sum((length - 1) * stride for length, stride in sizes))
    if tensor.ndim < 2 or not has_whole_rows(tensor):
        return Spans(tensor.data_ptr(), 0, 1, size)
    count, stride = len(tensor), tensor.stride(0) * tensor.itemsize
    return Spans(tensor.data_ptr(), stride, count, tensor.numel() // count * tensor.itemsize)


def written_by(rows: Rows) -> Spans:
    """The data of all entries of `rows`, and their scales where these lie behind."""
    if not len(rows.pool) or rows.pool.device.type == "meta":
        return Spans(0, 0, 0, 0)
    ends = [rows.data_offset + rows.rows * rows.record.data_bytes]
    begin = rows.data_offset
    if rows.record.scale_bytes:
        ends.append(rows.scale_offset + rows.rows * rows.record.scale_bytes)
        begin = min(begin, rows.scale_offset)
    address = rows.pool.data_ptr() + begin
    return Spans(address, rows.pool.stride(0), len(rows.pool), max(ends) - begin)


def overlap(one: Spans, other: Spans) -> bool:
    """Whether a byte is in both."""
    if not one.count or not other.count or one.end <= other.begin or other.end <= one.begin:
        return False
    if one.count == other.count == 1:
        return True
    few, many = sorted((one, other), key=lambda spans: spans.count)
    begins = np.sort(many.begins)
    # Of pieces that are equally long the last one that begins before an end reaches the furthest.
    last = np.searchsorted(begins, few.begins + few.size, "left") - 1
    found = last >= 0
    return bool((begins[last[found]] + many.size > few.begins[found]).any())


def require_apart(read: dict[str, Spans], written: dict[str, Spans]) -> None:
    """ValueError for memory that is both read and written, or written as two things."""
    names = [*written]
    for place, name in enumerate(names):
        others = {**read, **{other: written[other] for other in names[place + 1 :]}}
        for other, spans in others.items():
            if overlap(spans, written[name]):
                raise ValueError(
                    f"{other} and {name} share memory, from {max(spans.begin, written[name].begin)}"
                    f" on: what is written may not be read beside"
                )


def require_once(name: str, numbers: torch.Tensor) -> None:
    """ValueError for a number other than NO_ENTRY that occurs twice; looked at on the CPU alone."""
    if numbers.device.type != "cpu" or numbers.numel() < 2:
        return
    values = numbers.numpy()
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    twice = np.flatnonzero((ordered[1:] == ordered[:-1]) & (ordered[1:] != NO_ENTRY))
    if len(twice):
        first, second = sorted(order[twice[0] : twice[0] + 2].tolist())
        raise ValueError(
            f"{name} has {int(ordered[twice[0]])} twice, at {first} and {second}: each is written "
            "once"
        )
