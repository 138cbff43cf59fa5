"""Random kernels that access global memory anywhere, mostly out of bounds.

Each access is one instruction of one form, with random lanes, element sizes and addresses: inside,
around the ends of the one allocation, far beyond it, null, not mapped, or no address at all.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from ptxemu.machine.tensor_map import encode
from tests.ptxemu.kernels import kernel

BYTES = 1024  # of the allocation
GUARD = 4096  # bytes around it that must stay as they are
_ALIGN = 128
_SHARED = ".shared .align 128 .b8 tile[2048];\n.shared .align 8 .b8 full[8];\n"
_WAIT = "W:\nmbarrier.try_wait.parity.shared.b64 %p0, [full], 0;\n@!%p0 bra W;\n"
_DONE = "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\n"


@dataclass(frozen=True)
class Form:
    """Form of an access.

    body: the instructions, with the address in %rd2.
    size: bytes per lane.
    lanes: number of lanes.
    reads, writes: which of the two it does.
    """

    body: str
    size: int
    lanes: int = 32
    reads: bool = True
    writes: bool = False
    map: str = ""  # "load" or "store": a tensor map at the address


def _vectors(kind: str) -> list[Form]:
    forms = []
    for space in (".global", ""):
        for bits, count in ((8, 1), (16, 1), (32, 1), (64, 1), (32, 2), (32, 4), (64, 2)):
            register = {8: "%h", 16: "%h", 32: "%r", 64: "%rd"}[bits]
            names = [f"{register}{4 + i}" for i in range(count)]
            listed = f"{{{', '.join(names)}}}" if count > 1 else names[0]
            vector = f".v{count}" * (count > 1)
            text = f"{kind}{space}{vector}.b{bits} "
            text += f"{listed}, [%rd2];" if kind == "ld" else f"[%rd2], {listed};"
            size = bits * count // 8
            for lanes in (1, 32):
                forms.append(Form(text, size, lanes, kind == "ld", kind == "st"))
    return forms


_BULK = "mbarrier.init.shared.b64 [full], 1;\n"
FORMS = [
    *_vectors("ld"),
    *_vectors("st"),
    Form("atom.global.add.u32 %r4, [%rd2], 1;", 4, 32, True, True),
    Form("atom.global.cas.b64 %rd4, [%rd2], 0, 1;", 8, 1, True, True),
    Form("red.global.max.u32 [%rd2], 7;", 4, 32, True, True),
    Form("red.add.f32 [%rd2], %f0;", 4, 32, True, True),
    Form(
        "mov.u32 %r1, tile;\nshl.b32 %r2, %r0, 4;\nadd.u32 %r1, %r1, %r2;\n"
        "cp.async.ca.shared.global [%r1], [%rd2], 16;\ncp.async.commit_group;\n"
        "cp.async.wait_group 0;",
        16,
    ),
    Form(
        f"{_BULK}mbarrier.arrive.expect_tx.shared.b64 _, [full], 256;\n"
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [tile], [%rd2], 256, [full];"
        f"\n{_WAIT}",
        256,
        1,
    ),
    Form(
        f"cp.async.bulk.global.shared::cta.bulk_group [%rd2], [tile], 256;\n{_DONE}",
        256, 1, False, True,
    ),
    Form(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd2], [tile], 256;\n"
        f"{_DONE}",
        256, 1, True, True,
    ),
    Form("tensormap.replace.tile.global_dim.global.b1024.b32 [%rd2], 0, 16;", 128, 1, True, True),
    Form(
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
        "[%rd2], [tile], 128;",
        128, 1, False, True,
    ),
    Form(
        f"{_BULK}mbarrier.arrive.expect_tx.shared.b64 _, [full], 1024;\n"
        "mov.u64 %rd5, m;\ncvta.param.u64 %rd5, %rd5;\nmov.u32 %r1, {x};\nmov.u32 %r2, {y};\n"
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
        f"[tile], [%rd5, {{%r1, %r2}}], [full];\n{_WAIT}",
        0, 1, True, False, "load",
    ),
    Form(
        "mov.u64 %rd5, m;\ncvta.param.u64 %rd5, %rd5;\nmov.u32 %r1, {x};\nmov.u32 %r2, {y};\n"
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd5, {%r1, %r2}], [tile];\n"
        f"{_DONE}",
        0, 1, False, True, "store",
    ),
]  # fmt: skip


@dataclass(frozen=True)
class Wild:
    """A kernel, its parameters for an allocation at `start`, and whether it goes astray."""

    text: str
    params: list[bytes]
    threads: int
    astray: bool
    writes: bool
    form: Form


def wild(seed: int, start: int) -> Wild:
    """The kernel of a seed for an allocation of BYTES at `start`, a multiple of 128."""
    chance = random.Random(seed)
    form = FORMS[seed % len(FORMS)] if chance.random() < 0.5 else chance.choice(FORMS)
    if form.map:
        return _tensor(chance, form, start)
    aligned = min(form.size & -form.size, _ALIGN)
    spread = chance.choice((0, 1, 1, 2, 64)) * max(form.size, 4)
    first = _address(chance, start, aligned)
    body = "ld.param.u64 %rd1, [d];\nmov.u32 %r0, %tid.x;\nmov.f32 %f0, 0f3F800000;\n"
    body += "".join(
        f"mov.b16 %h{i}, 1;\nmov.u32 %r{i}, 1;\nmov.u64 %rd{i}, 1;\n" for i in range(4, 8)
    )
    body += f"mad.wide.u32 %rd2, %r0, {spread}, %rd1;\n{form.body}"
    text = kernel(body, ".param .u64 d", _SHARED)
    places = [first + lane * spread & (1 << 64) - 1 for lane in range(form.lanes)]
    astray = any(place < start or place + form.size > start + BYTES for place in places)
    params = [first.to_bytes(8, "little")]
    return Wild(text, params, form.lanes, astray, form.writes, form)


def _address(chance: random.Random, start: int, aligned: int) -> int:
    where = chance.randrange(8)
    address = [
        start + chance.randrange(BYTES // 2),
        start + chance.randrange(BYTES - 64, BYTES + 64),
        start - chance.randrange(1, 512),
        start + BYTES + chance.randrange(512),
        start + chance.choice((-1, 1)) * chance.randrange(1 << 20, 1 << 40),
        chance.randrange(1 << 12),
        chance.randrange(1 << 46, 1 << 47),
        chance.randrange(3 << 56, 1 << 64),  # above the windows of other spaces
    ][where]
    return (address & (1 << 56) - 1 if where < 7 else address) // aligned * aligned


def _tensor(chance: random.Random, form: Form, start: int) -> Wild:
    """A tensor of 64 rows of 16 bytes fills the allocation; wild ones begin elsewhere, or have more
    rows. A box has eight rows, at a place that may be outside the tensor, which is no error."""
    rows = chance.choice((64, 64, 65, 4096))
    base = start if chance.random() < 0.5 else _address(chance, start, 16) & (1 << 47) - 16
    low = -64 if form.map == "load" else 0
    x, y = chance.choice((0, 0, 0, low, 8)), chance.choice((0, 8, 56, 60, 63, 64, 1000, low))
    inside = [row for row in range(y, y + 64) if 0 <= row < rows] if x == 0 else []
    places = [base + 16 * row for row in inside]
    astray = any(place < start or place + 16 > start + BYTES for place in places)
    described = encode(base, (8, rows), (16,), (8, 64), "u16", "none")
    body = form.body.replace("{x}", str(x)).replace("{y}", str(y))
    text = kernel(body, ".param .align 64 .b8 m[128]", _SHARED)
    return Wild(text, [described], 1, astray, form.writes, form)


def guarded() -> tuple[np.ndarray, int]:
    """Return (memory full of 0x5A, address of the allocation in its middle)."""
    memory = np.full(GUARD + BYTES + GUARD + _ALIGN, 0x5A, np.uint8)
    start = memory.ctypes.data + GUARD
    return memory, -(-start // _ALIGN) * _ALIGN
