"""ld and st: where an address lies, and moving elements between lanes and memory.

Scalar forms serve a uniform address, vector forms one address per lane. Spaces are named as in PTX;
`generic` is decided by the window that an address lies in: shared and local memory have windows
above every host address, all else is global.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxemu.errors import HardwareRefusal, OutOfBounds, UnsupportedPtx
from ptxemu.machine.state import OFFSET_MASK, POISON_BYTE, RANK_SHIFT, Cta, Warp

SHARED_WINDOW = 1 << 56  # generic address of shared address 0
_WINDOW_SHIFT = 56
_WINDOWS = ("global", "cluster", "local")
_STEP = {n: np.arange(n, dtype=np.int64)[:, None] for n in (1, 2, 4, 8, 16)}


class AsyncView:
    """A CTA as tcgen05 sees it: tensor memory as it is, shared memory through the async proxy."""

    __slots__ = ("smem", "smem_at", "tmem")

    def __init__(self, cta: Cta) -> None:
        self.smem = cta.as_seen_by_async()
        self.smem_at = self.smem.ctypes.data
        self.tmem = cta.tmem


def _cta_of(w: Warp, space: str, address: int) -> Cta:
    return w.cta if space == "shared" else w.cluster.cta(address >> RANK_SHIFT)


def _window(address: int) -> str:
    """The space behind a generic address. Those above all windows are wild: they count as global,
    as they are, and nothing is there."""
    kind = address >> _WINDOW_SHIFT
    return _WINDOWS[kind] if kind < len(_WINDOWS) else "global"


def _require_aligned(address: int, nbytes: int, space: str) -> None:
    if address & (nbytes - 1):
        raise HardwareRefusal(f"misaligned {space} access of {nbytes} bytes at {address:#x}")


# -- uniform address ------------------------------------------------------------------------


def _place(
    w: Warp, space: str, address: int, size: int, count: int, stored: list[int] | None = None
) -> tuple[np.ndarray, int]:
    """Return (typed view, element index) of a uniform address that is accessed."""
    write = stored is not None
    if space == "generic":
        space = _window(address)
        if space != "global":
            address &= SHARED_WINDOW - 1
    _require_aligned(address, size * count, space)
    if space == "global":
        place = w.machine.memory.place(address, size, count, write)
        for each in w.listeners:
            if stored is None:
                each.global_read(w, address, size * count, None)
            else:
                values = np.array(stored, f"u{size}")[:, None]
                each.global_write(w, np.array([address], np.uint64), size, values, None)
        return place
    if space == "param":
        block = w.machine.params
        if address + size * count > len(block):
            raise OutOfBounds(
                f"parameter access at {address:#x}; the parameters have {len(block)} bytes"
            )
        return w.machine.param_views[size], address // size
    if space == "local":
        raise UnsupportedPtx("a uniform access to local memory")
    cta = _cta_of(w, space, address)
    offset = address & OFFSET_MASK
    cta.check(offset, size * count)
    if write:
        cta.mark_generic(slice(offset, offset + size * count))
    if stored is not None and w.listeners:
        w.storing = np.array(stored, f"u{size}")[:, None]
    for each in w.listeners:
        each.shared_access(w, cta, offset, size * count, None, write)
    return cta.views[size], offset // size


def load_scalar(w: Warp, space: str, address: int, size: int, count: int) -> Any:
    """`count` elements of `size` bytes at one address for the whole warp."""
    nbytes, offset = size * count, address & OFFSET_MASK
    if space == "param" and count == 1 and not address & (size - 1):
        view = w.machine.param_views[size]
        if address < len(view) * size:
            return view.item(address // size)
    quiet = space == "shared" and not w.listeners and not address & (nbytes - 1)
    if quiet and offset + nbytes <= w.cta.smem_size:  # what kernels do all the time
        view, index = w.cta.views[size], offset // size
    else:
        view, index = _place(w, space, address, size, count)
    if space == "global":
        w.machine.bytes["ld.global"] += nbytes
    if count == 1:
        return view.item(index)
    return view[index : index + count].tolist()


def store_scalar(w: Warp, space: str, address: int, size: int, values: tuple[Any, ...]) -> None:
    """Elements to one address: of lanes that disagree, the last active one wins."""
    w.stored = True
    last = w.frag.mask.bit_length() - 1
    stored = [value if not isinstance(value, np.ndarray) else value[last] for value in values]
    view, index = _place(w, space, address, size, len(values), stored)
    if space == "global":
        w.machine.bytes["st.global"] += size * len(values)
    view[index : index + len(stored)] = stored


# -- one address per lane -------------------------------------------------------------------


def load_vector(
    w: Warp, space: str, address: np.ndarray, size: int, count: int, mask: np.ndarray | None
) -> np.ndarray:
    """Return uint [count, 32]; inactive lanes are zero."""
    if mask is None:
        return _gather(w, space, address, size, count, _LANES)
    out = np.zeros((count, 32), f"u{size}")
    lanes = np.flatnonzero(mask)
    out[:, lanes] = _gather(w, space, address[lanes], size, count, lanes)
    return out


def store_vector(
    w: Warp, space: str, address: np.ndarray, size: int, values: np.ndarray, mask: np.ndarray | None
) -> None:
    """values [count, 32] (or broadcastable) to one address per lane."""
    w.stored = True
    lanes = _LANES if mask is None else np.flatnonzero(mask)
    rows = values if values.shape[-1] == 32 else np.broadcast_to(values, (len(values), 32))
    if mask is not None:
        address, rows = address[lanes], rows[:, lanes]
    _scatter(w, space, address, size, rows, lanes)


_LANES = np.arange(32)


def _split(w: Warp, space: str, address: np.ndarray, act: Callable[..., None]) -> None:
    """Call act(space, address part, lane selection) for each window or CTA that the lanes reach."""
    if space == "generic":
        kinds = address >> np.uint64(_WINDOW_SHIFT)
        for kind in np.unique(kinds).tolist():
            chosen = kinds == kind
            part, where = address[chosen], _window(kind << _WINDOW_SHIFT)
            if where != "global":
                part = part & np.uint64(SHARED_WINDOW - 1)
            act(where, part, chosen)
    else:
        ranks = address >> RANK_SHIFT
        for rank in np.unique(ranks).tolist():
            act(rank, address, ranks == rank)


def _gather(
    w: Warp, space: str, address: np.ndarray, size: int, count: int, lanes: np.ndarray
) -> np.ndarray:
    if space == "global":
        w.machine.bytes["ld.global"] += size * count * len(lanes)
        for each in w.listeners:
            each.global_read(w, address, size * count, lanes)
        return w.machine.memory.gather(address, size, count)
    if space in ("shared", "param"):
        return _gather_cta(w, w.cta if space == "shared" else None, address, size, count, lanes)
    if space == "local":
        where = lanes, _index(address, size, count, "local") + _STEP[count]
        return _local(w, where, size, False)[where]
    out = np.empty((count, len(lanes)), f"u{size}")

    def act(where: Any, part: np.ndarray, chosen: np.ndarray) -> None:
        if space == "generic":
            narrow = part.astype(np.uint32) if where == "cluster" else part
            out[:, chosen] = _gather(w, where, narrow, size, count, lanes[chosen])
        else:
            cta = w.cluster.cta(where)
            out[:, chosen] = _gather_cta(w, cta, part[chosen], size, count, lanes[chosen])

    _split(w, space, address, act)
    return out


def _gather_cta(
    w: Warp, cta: Cta | None, address: np.ndarray, size: int, count: int, lanes: np.ndarray
) -> np.ndarray:
    if cta is None:
        index = _index(address, size, count, "shared")
        return w.machine.param_views[size][index + _STEP[count]]
    index = _shared_index(cta, address, size, count)
    for each in w.listeners:
        each.shared_access(w, cta, index * size, size * count, lanes, False)
    return cta.views[size][index + _STEP[count]]


def _shared_index(cta: Cta, address: np.ndarray, size: int, count: int) -> np.ndarray:
    """Element indices, after the checks of alignment and bounds."""
    offsets = address & OFFSET_MASK
    bits = int(np.bitwise_or.reduce(offsets))
    _require_aligned(bits, size * count, "shared")
    index = offsets.astype(np.int64) >> size.bit_length() - 1
    if bits + count * size > cta.smem_size:  # no offset is above the bits of all of them
        top = int(index.max()) * size
        if top + count * size > cta.smem_size:
            cta.check(top, count * size)
    return index


def _index(address: np.ndarray, size: int, count: int, space: str) -> np.ndarray:
    """Element indices, after the alignment check."""
    _require_aligned(int(np.bitwise_or.reduce(address)), size * count, space)
    return address.astype(np.int64) // size


def _scatter(
    w: Warp, space: str, address: np.ndarray, size: int, rows: np.ndarray, lanes: np.ndarray
) -> None:
    if space == "global":
        w.machine.bytes["st.global"] += size * len(rows) * len(lanes)
        for each in w.listeners:
            each.global_write(w, address, size, rows, lanes)
        w.machine.memory.scatter(address, size, rows)
    elif space == "shared":
        _scatter_cta(w, w.cta, address, size, rows, lanes)
    elif space == "local":
        where = lanes, _index(address, size, len(rows), "local") + _STEP[len(rows)]
        _local(w, where, size, True)[where] = rows
    else:

        def act(where: Any, part: np.ndarray, chosen: np.ndarray) -> None:
            if space == "generic":
                narrow = part.astype(np.uint32) if where == "cluster" else part
                _scatter(w, where, narrow, size, rows[:, chosen], lanes[chosen])
            else:
                cta = w.cluster.cta(where)
                _scatter_cta(w, cta, part[chosen], size, rows[:, chosen], lanes[chosen])

        _split(w, space, address, act)


def _scatter_cta(
    w: Warp, cta: Cta, address: np.ndarray, size: int, rows: np.ndarray, lanes: np.ndarray
) -> None:
    count = len(rows)
    index = _shared_index(cta, address, size, count)
    if w.listeners:
        w.storing = rows
    for each in w.listeners:
        each.shared_access(w, cta, index * size, size * count, lanes, True)
    cta.views[size][index + _STEP[count]] = rows
    if cta.unfenced is not None:  # or the bytes need not be listed
        cta.mark_generic((index * size) + np.arange(size * count)[:, None])


def _local(w: Warp, where: tuple[np.ndarray, np.ndarray], size: int, write: bool) -> np.ndarray:
    """Local memory as [lane, element of `size` bytes], made on first use; `where` is accessed."""
    room = -(-w.program.layout.local_bytes // 16) * 16
    if w.local is None or w.local.shape[1] < room:
        _make_local(w, room, (int(where[1].max(initial=0)) + 1) * size)
    assert w.local is not None
    beyond = (where[1] < 0) | (where[1] >= room // size)
    if beyond.any():
        what = "write to" if write else "read of"
        first = int(where[1][beyond][0]) * size & (1 << 64) - 1
        raise OutOfBounds(
            f"{what} {len(where[1]) * size} bytes of local memory, offset {first:#x}; a thread has"
            f" {room} bytes"
        )
    for each in w.listeners:
        each.local_access(w, *where, size, write)
    return w.local.view(f"u{size}")


_LOCAL_BYTES = 16 << 10  # of a thread, to begin with


def _make_local(w: Warp, room: int, needed: int) -> None:
    """Local memory of at least `needed` bytes, up to `room`: a stack is rarely used up."""
    before = 0 if w.local is None else w.local.shape[1]
    nbytes = before or min(room, _LOCAL_BYTES)
    while nbytes < min(needed, room):
        nbytes = min(2 * nbytes, room)
    if nbytes > before:
        local = np.full((32, nbytes), POISON_BYTE, np.uint8)
        if w.local is not None:
            local[:, :before] = w.local
        w.local = local
