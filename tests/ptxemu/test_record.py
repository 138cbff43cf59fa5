"""`Options(record=True)`: the actions of each warp of a launch."""

from __future__ import annotations

import numpy as np
import pytest

from ptxemu.native.library import without
from ptxemu.record import recording as r
from tests.ptxemu.kernels import DYNAMIC, POINTER, kernel, launch

LANE = "mov.u32 %r0, %tid.x; mov.u32 %r1, dynamic;"


def recorded(body: str, **how: object) -> r.Recording:
    report = launch(kernel(LANE + body, before=DYNAMIC), smem_bytes=32768, record=True, **how)
    assert report.recording is not None
    return report.recording


BARRIER = (
    "setp.eq.u32 %p0, %r0, 0; @%p0 mbarrier.init.shared.b64 [%r1], 3; bar.sync 0;"
    "@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 64;"
    "@%p0 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r1], 64;"
    "setp.lt.u32 %p1, %r0, 2; @%p1 mbarrier.arrive.shared.b64 _, [%r1];"
    "mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;"
)


def test_events_of_an_mbarrier_in_order():
    (warp,) = recorded(BARRIER).warps
    place = (0, 1024)
    told = [(event.what, event.signals) for event in warp.events]
    assert told == [
        (r.INIT, ((place, 3),)),
        (r.BARRIER, ()),
        (r.EXPECT, ((place, 64),)),
        (r.ARRIVE, ((place, 1),)),
        (r.COMPLETE, ((place, 64),)),
        (r.ARRIVE, ((place, 2),)),  # two lanes, one instruction
        (r.WAIT, ((place, 0),)),
    ]
    (barrier,) = (event for event in warp.events if event.what == r.BARRIER)
    assert barrier.shape == (0, 32)


def test_the_path_is_what_was_executed():
    """A loop of five iterations: its block occurs five times in the path."""
    loop = "mov.u32 %r2, 0; LOOP: add.u32 %r2, %r2, 1; setp.lt.u32 %p0, %r2, 5; @%p0 bra LOOP;"
    recording = recorded(loop)
    (warp,) = recording.warps
    times = {block: warp.path.tolist().count(block) for block in set(warp.path.tolist())}
    turned = [block for block, count in times.items() if count == 5]
    assert len(turned) == 1
    texts = [recording.sites[site].opcode for site in recording.blocks[turned[0]]]
    assert texts[:2] == ["add.u32", "setp.lt.u32"]


# bytes of a lane, distance of two lanes -> accesses to shared memory
PASSES = {
    (4, 4): 1,
    (4, 0): 1,  # one word for all
    (4, 8): 2,
    (4, 128): 32,
    (4, 132): 1,
    (8, 8): 2,
    (16, 16): 4,
    (16, 128): 32,  # eight lanes of each quarter in the same four banks
}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("nbytes", "apart"), list(PASSES))
def test_bank_conflicts(nbytes, apart, native):
    vector = {4: ("", "%r3"), 8: (".v2", "{%r3, %r4}"), 16: (".v4", "{%r3, %r4, %r5, %r6}")}
    form, registers = vector[nbytes]
    body = (
        f"mad.lo.u32 %r2, %r0, {apart}, %r1; mov.u32 %r3, 1; mov.u32 %r4, 1; mov.u32 %r5, 1;"
        f"mov.u32 %r6, 1; st.shared{form}.u32 [%r2], {registers};"
    )
    if native:
        (warp,) = recorded(body).warps
    else:
        with without():
            (warp,) = recorded(body).warps
    (access,) = warp.accesses()
    assert access == ("shared", True, nbytes, PASSES[nbytes, apart], 1024)


@pytest.mark.parametrize(("apart", "sectors"), [(4, 4), (8, 8), (32, 32), (0, 1), (64, 32)])
def test_sectors_of_global_memory(apart, sectors):
    room = np.zeros(32 * 64 + 64, np.uint8)
    data = room[-room.ctypes.data % 64 :][: 32 * 64]
    body = (
        f"{POINTER} mul.wide.u32 %rd3, %r0, {apart}; add.u64 %rd3, %rd3, %rd1;"
        "ld.global.u32 %r1, [%rd3]; st.global.u32 [%rd2], %r1;"
    )
    report = launch(kernel(body, ".param .u64 d"), data, record=True)
    load, store = report.recording.warps[0].accesses()
    assert load == ("global", False, 4, sectors, data.ctypes.data)
    assert store == ("global", True, 4, 4, data.ctypes.data)


def test_more_accesses_than_there_is_room_for():
    loop = (
        "mov.u32 %r2, 0; LOOP: mad.lo.u32 %r3, %r0, 4, %r1; ld.shared.u32 %r4, [%r3];"
        "add.u32 %r2, %r2, 1; setp.lt.u32 %p0, %r2, 5000; @%p0 bra LOOP;"
    )
    (warp,) = recorded(loop).warps
    assert len(list(warp.accesses())) == 5000


def test_some_clusters_alone():
    recording = recorded("bar.sync 0;", grid=(7,), clusters=(5, 2))
    assert [warp.cluster for warp in recording.warps] == [5, 2]
    assert [warp.cluster for warp in recorded("bar.sync 0;", grid=(7,), clusters=3).warps] == [
        0,
        3,
        6,
    ]
    assert [warp.cluster for warp in recorded("bar.sync 0;", grid=(7,), clusters=4).warps] == [
        *(0, 1, 3, 6),
    ]
    asked = recorded("bar.sync 0;", grid=(7,), clusters=lambda total: (total - 1, 2))
    assert [warp.cluster for warp in asked.warps] == [6, 2]


@pytest.mark.parametrize("clusters", [0, (), (-1,), (7,)])
def test_clusters_that_are_none(clusters):
    with pytest.raises(ValueError, match="clusters="):
        recorded("bar.sync 0;", grid=(7,), clusters=clusters)


def test_nothing_changes_for_the_kernel():
    """The counts are the same with and without a recording."""
    source = kernel(LANE + BARRIER, before=DYNAMIC)
    plain, taped = (launch(source, smem_bytes=4096, record=record) for record in (False, True))
    assert plain.by_warp == taped.by_warp
    assert plain.recording is None
