"""tile::gather4 and tile::scatter4: four rows with coordinates of their own, in and out of the
tensor, swizzled and not; and what the tensor map has to be.
"""

from __future__ import annotations

import numpy as np
import pytest

import ptxemu
from lab.silicon.conformance.ptx_program import aligned_copy
from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.machine import tensor_map
from tests.ptxemu import kernels

ROWS, COLUMNS = 40, 96  # of the tensor, of 16-bit elements
WIDTH = 64  # of the box: 128 bytes
BYTES = 4 * 2 * WIDTH
GATHER = (
    "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes"
    " [%r1], [%rd0, {%r10, %r11, %r12, %r13, %r14}], [%r1+4096];"
)
SCATTER = (
    "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group"
    " [%rd0, {%r10, %r11, %r12, %r13, %r14}], [%r1];"
)
CHOSEN = [(0, 3, 3, 39, 0), (32, 7, 1, 0, 2), (64, 5, 6, 7, 8), (0, 40, 2, -1, 9)]


def encoded(tensor: np.ndarray, box: tuple[int, ...] = (WIDTH, 1), swizzle: str = "none") -> bytes:
    rows = len(tensor)
    sides = (COLUMNS, rows) if len(box) == 2 else (COLUMNS, rows // 2, 2)
    strides = (2 * COLUMNS,) if len(box) == 2 else (2 * COLUMNS, COLUMNS * rows)
    address = tensor.ctypes.data
    return bytes(tensor_map.encode(address, sides, strides, box, "u16", swizzle))


def launch(
    body: str, tensor: np.ndarray, other: np.ndarray, coordinates: tuple[int, ...], map_: bytes,
    **how: object,
) -> ptxemu.LaunchReport:  # fmt: skip
    """A warp whose lane 0 does `body` and all of which copy the box's shared memory from or to
    `other`. %rd0: the map, %r1: shared memory, %r10 to %r14: coordinates."""
    values = "".join(f"mov.b32 %r{10 + k}, {x};" for k, x in enumerate(coordinates))
    text = kernels.kernel(
        f"""mov.u64 %rd0, map; cvta.param.u64 %rd0, %rd0; ld.param.u64 %rd1, [b];
        mov.u32 %r0, %tid.x; mov.u32 %r1, dynamic; shl.b32 %r2, %r0, 2; add.u32 %r2, %r2, %r1;
        mul.wide.u32 %rd2, %r0, 4; add.u64 %rd1, %rd1, %rd2; setp.eq.u32 %p0, %r0, 0;
        {values}
        {body}""",
        ".param .align 64 .b8 map[128], .param .u64 b",
        kernels.DYNAMIC,
    )
    params = [map_, *kernels.pointers(other)]
    return kernels.launch(
        text, params=params, memory=[tensor, other], smem_bytes=8192, check=True, **how
    )


def gather(load: str = GATHER) -> str:
    copies = "".join(
        f"ld.shared.b32 %r3, [%r2+{k}]; st.global.b32 [%rd1+{k}], %r3;"
        for k in range(0, BYTES, 128)
    )
    return f"""@%p0 mbarrier.init.shared.b64 [%r1+4096], 1;
        fence.mbarrier_init.release.cluster; bar.warp.sync -1;
        @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1+4096], {BYTES};
        @%p0 {load}
        W: mbarrier.try_wait.parity.shared.b64 %p1, [%r1+4096], 0;
        @!%p1 bra W;
        {copies}"""


def swizzled(image: np.ndarray) -> np.ndarray:
    """128-byte rows with their 16-byte chunks exchanged: chunk c of row r is at c ^ r."""
    chunks = image.view(np.uint8).reshape(4, 8, 16)
    return np.stack([chunks[r, np.arange(8) ^ r] for r in range(4)]).reshape(-1)


def box_of(tensor: np.ndarray, coordinates: tuple[int, ...]) -> np.ndarray:
    """[row, column] of what is loaded, zero outside of the tensor."""
    column, *rows = coordinates
    image = np.zeros((4, WIDTH), np.uint16)
    for k, row in enumerate(rows):
        if 0 <= row < ROWS:
            part = tensor[row, column : column + WIDTH]
            image[k, : len(part)] = part
    return image


def numbered() -> np.ndarray:
    return aligned_copy(np.arange(1, ROWS * COLUMNS + 1).astype(np.uint16)).reshape(ROWS, COLUMNS)


@pytest.mark.parametrize("policy", ["round-robin", "adversarial"])
@pytest.mark.parametrize("swizzle", ["none", "128B"])
@pytest.mark.parametrize("coordinates", CHOSEN)
def test_four_rows_are_loaded(coordinates: tuple[int, ...], swizzle: str, policy: str) -> None:
    tensor, out = numbered(), aligned_copy(np.zeros(BYTES, np.uint8))
    map_ = encoded(tensor, swizzle=swizzle)
    report = launch(gather(), tensor, out, coordinates, map_, policy=policy)
    image = box_of(tensor, coordinates)
    expected = swizzled(image) if swizzle == "128B" else image.reshape(-1).view(np.uint8)
    assert (out == expected).all()
    assert not report.findings


@pytest.mark.parametrize("policy", ["round-robin", "adversarial"])
@pytest.mark.parametrize("swizzle", ["none", "128B"])
@pytest.mark.parametrize("coordinates", [(0, 3, 4, 39, 0), (64, 5, 6, 7, 8), (32, 40, 2, 1, 9)])
def test_four_rows_are_stored(coordinates: tuple[int, ...], swizzle: str, policy: str) -> None:
    tensor = aligned_copy(np.zeros(ROWS * COLUMNS, np.uint16)).reshape(ROWS, COLUMNS)
    image = np.arange(1, 4 * WIDTH + 1).astype(np.uint16).reshape(4, WIDTH)
    source = aligned_copy(
        swizzled(image) if swizzle == "128B" else image.reshape(-1).view(np.uint8)
    )
    copies = "".join(
        f"ld.global.b32 %r3, [%rd1+{k}]; st.shared.b32 [%r2+{k}], %r3;"
        for k in range(0, BYTES, 128)
    )
    body = f"""{copies} fence.proxy.async; bar.warp.sync -1;
        @%p0 {SCATTER}
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
    map_ = encoded(tensor, swizzle=swizzle)
    report = launch(body, tensor, source, coordinates, map_, policy=policy)
    expected = np.zeros_like(tensor)
    column, *rows = coordinates
    for k, row in enumerate(rows):
        if row < ROWS:
            expected[row, column : column + WIDTH] = image[k, : COLUMNS - column]
    assert (tensor == expected).all()
    assert not report.findings


def test_without_a_wait_the_load_is_a_race() -> None:
    """The checker knows which shared memory the four rows take."""
    tensor, out = numbered(), aligned_copy(np.zeros(BYTES, np.uint8))
    body = gather()
    start = body.index("W:")
    unwaited = body[:start] + body[body.index("bra W;") + len("bra W;") :]
    report = launch(unwaited, tensor, out, CHOSEN[0], encoded(tensor))
    assert any(finding.check == "race" for finding in report.findings)


def test_columns_have_to_start_at_16_bytes() -> None:
    tensor, out = numbered(), aligned_copy(np.zeros(BYTES, np.uint8))
    with pytest.raises(HardwareRefusal, match="multiple of 16 bytes"):
        launch(gather(), tensor, out, (3, 0, 1, 2, 3), encoded(tensor))


@pytest.mark.parametrize("box", [(WIDTH, 4), (WIDTH, 1, 1)])
def test_the_map_has_two_dimensions_and_a_box_of_one_row(box: tuple[int, ...]) -> None:
    tensor, out = numbered(), aligned_copy(np.zeros(BYTES, np.uint8))
    with pytest.raises(HardwareRefusal, match="rank") as caught:
        launch(gather(), tensor, out, CHOSEN[0], encoded(tensor, box))
    assert caught.value.line


@pytest.mark.parametrize("changed", [
    GATHER.replace(", %r14}", "}"),
    GATHER.replace("2d", "3d"),
    GATHER.replace("gather4", "scatter4"),
    SCATTER.replace("scatter4", "gather4"),
    GATHER.replace("::gather4", ""),
    GATHER.replace("tile::gather4", "im2col"),
])  # fmt: skip
def test_forms_that_there_are_not_are_refused_by_name(changed: str) -> None:
    tensor, out = numbered(), aligned_copy(np.zeros(BYTES, np.uint8))
    with pytest.raises(UnsupportedPtx, match=r"bulk\.tensor") as caught:
        launch(gather(changed), tensor, out, CHOSEN[0], encoded(tensor))
    assert caught.value.line
