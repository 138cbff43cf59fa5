"""st.async of many lanes is one operation of the emulator; nobody can tell it from one each."""

from __future__ import annotations

import numpy as np
import pytest

import ptxemu
from ptxemu.inspect import Inspect, Watch
from ptxemu.options import Options
from tests.ptxemu.kernels import kernel

STORE = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32"
INIT = (
    "mov.u32 %r0, %tid.x; mov.u32 %r1, dynamic; mad.lo.u32 %r2, %r0, 4, %r1;"
    "setp.eq.u32 %p0, %r0, 0; @%p0 mbarrier.init.shared.b64 [%r1], 1;"
    "@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 128;"
)


def launched(body: str, threads: int, **options: object) -> ptxemu.LaunchReport:
    source = kernel(INIT + body, before=".extern .shared .align 1024 .b8 dynamic[];\n")
    how = Options(limit=None, **options)
    return ptxemu.load(source).launch(
        grid=(1, 1, 1), block=(threads, 1, 1), smem_bytes=4096, params=[], options=how
    )


@pytest.mark.parametrize("step", [4, 0], ids=["each its own place", "two places"])
def test_a_watch_sees_what_each_lane_stores(step):
    where = f"and.b32 %r4, %r0, {31 if step else 1}; mad.lo.u32 %r4, %r4, 4, %r1;"
    report = launched(
        f"bar.warp.sync -1; add.u32 %r3, %r0, 100; {where} {STORE} [%r4+512], %r3, [%r1];",
        32,
        inspect=Inspect(quiet=True, keep=32, watches=(Watch("shared", 1024 + 512, 128),)),
    )
    (writes,) = report.inspection.histories().values()
    places = [write.first - write.low for write in writes]
    values = [w.value[at : at + 4].view(np.uint32)[0] for w, at in zip(writes, places, strict=True)]
    assert values == list(np.arange(100, 132))


def test_findings_come_in_the_order_of_the_lanes():
    """The mbarrier is not seen to be initialised, and lanes 20 and 25 race with ordinary stores."""
    races = "".join(
        f"setp.eq.u32 %p3, %r0, {thread}; @%p3 st.shared.u32 [%r1+{512 + 4 * lane}], %r0;"
        for thread, lane in ((9, 20), (10, 25))
    )
    store = f"setp.lt.u32 %p2, %r0, 32; @%p2 bra END; {STORE} [%r2+{512 - 128}], %r0, [%r1]; END:"
    found = [finding.check for finding in launched(races + store, 64, check=True).findings]
    assert found[:2] == ["mbarrier", "race"]
