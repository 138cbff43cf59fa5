"""tcgen05.shift in a kernel: 31 rows of a quarter of the lanes, in one CTA or in a pair, behind the
MMAs of its pipe and counted by a commit; what the checker says without the wait; refusals.
"""

from __future__ import annotations

import numpy as np
import pytest

import ptxemu
from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from tests.ptxemu import kernels

COLUMNS, AT = 32, 12  # columns that are filled; the first that is shifted
SHIFT = "tcgen05.shift.cta_group::{group}.down [%r12];"
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p2, [%r9+8], 0; @!%p2 bra W;"
DECLARED = ".shared .align 16 .b8 told[16];\n"


def launch(
    shift: str, lane: int, group: int = 1, wait: str = WAIT, target: str = "sm_100a", **how: object
) -> tuple[np.ndarray, ptxemu.LaunchReport]:
    """(tensor memory, uint32 [CTA, lane, column], the report): each cell held its place before."""
    registers = ", ".join(f"%r{20 + k}" for k in range(COLUMNS))
    fills = "".join(f"mad.lo.u32 %r{20 + k}, %r0, 1000, {k};" for k in range(COLUMNS))
    stores = "".join(f"st.global.u32 [%rd2+{4 * k}], %r{20 + k};" for k in range(COLUMNS))
    of_group = f"cta_group::{group}"
    multicast = ".multicast::cluster" if group == 2 else ""
    meet = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    text = kernels.kernel(
        f"""ld.param.u64 %rd1, [d]; mov.u32 %r0, %tid.x; mov.u32 %r9, told; mov.b16 %h0, 3;
        mov.u32 %r8, %cluster_ctarank; mad.lo.u32 %r2, %r8, 128, %r0;
        mad.wide.u32 %rd2, %r2, {4 * COLUMNS}, %rd1;
        shr.u32 %r1, %r0, 5; setp.eq.u32 %p0, %r1, 0; setp.eq.u32 %p1, %r0, 0;
        @%p0 tcgen05.alloc.{of_group}.sync.aligned.shared::cta.b32 [%r9], 32;
        @%p1 mbarrier.init.shared.b64 [%r9+8], 1; fence.mbarrier_init.release.cluster;
        bar.sync 0; {meet}
        ld.shared.u32 %r10, [%r9]; shl.b32 %r11, %r1, 21; add.u32 %r11, %r11, %r10;
        {fills}
        tcgen05.st.sync.aligned.32x32b.x{COLUMNS}.b32 [%r11], {{{registers}}};
        tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; bar.sync 0; {meet}
        tcgen05.fence::after_thread_sync;
        setp.eq.and.u32 %p1, %r8, 0, %p1; @!%p1 bra OTHERS;
        add.u32 %r12, %r10, {(lane << 16) + AT};
        {shift.format(group=group)}
        tcgen05.commit.{of_group}.mbarrier::arrive::one.shared::cluster{multicast}.b64 [%r9+8]
            {", %h0" if group == 2 else ""};
        OTHERS: {wait}
        tcgen05.fence::after_thread_sync;
        tcgen05.ld.sync.aligned.32x32b.x{COLUMNS}.b32 {{{registers}}}, [%r11];
        tcgen05.wait::ld.sync.aligned;
        {stores}
        tcgen05.fence::before_thread_sync; bar.sync 0; {meet}
        @%p0 tcgen05.dealloc.{of_group}.sync.aligned.b32 %r10, 32;""",
        ".param .u64 d",
        DECLARED,
    ).replace("sm_100a", target)
    out = np.zeros((group, 128, COLUMNS), np.uint32)
    shape = {"grid": (group,), "cluster": (group,), "block": (128,)}
    report = kernels.launch(text, out, **{"check": True, **shape, **how})
    return out, report


@pytest.mark.parametrize("how", [
    {}, {"policy": "adversarial", "seed": 0}, {"policy": "adversarial", "seed": 1},
])  # fmt: skip
@pytest.mark.parametrize(("lane", "group"), [(0, 1), (96, 1), (32, 2)])
def test_rows_of_a_quarter_move_by_one(lane, group, how):
    out, report = launch(SHIFT, lane, group, **how)
    expected = np.arange(128)[:, None] * 1000 + np.arange(COLUMNS)
    expected[lane : lane + 31, AT : AT + 8] += 1000
    assert (out == expected).all()
    assert not report.findings


def test_who_does_not_wait_for_the_commit_races():
    _, report = launch(SHIFT, 64, wait="")
    races = [finding for finding in report.errors if finding.check == "race"]
    assert races
    assert "tcgen05.shift" in str(races)


@pytest.mark.parametrize("lane", [16, 31, 128])
def test_lanes_that_are_no_quarter(lane):
    with pytest.raises(HardwareRefusal, match=f"at TMEM lane {lane}, must be 0, 32") as caught:
        launch(SHIFT, lane)
    assert caught.value.line


def test_columns_that_are_not_allocated():
    with pytest.raises(HardwareRefusal, match="not allocated"):
        launch(f"add.u32 %r12, %r12, 16; {SHIFT}", 0)


@pytest.mark.parametrize(("text", "target", "message"), [
    (SHIFT.replace(".down", ""), "sm_100a", "a .cta_group and .down are needed"),
    (SHIFT.replace(".cta_group::{group}", ""), "sm_100a", "a .cta_group and .down are needed"),
    (SHIFT.replace(".down", ".up"), "sm_100a", "shift"),
    (SHIFT, "sm_100f", "needs sm_100a"),
])  # fmt: skip
def test_forms_that_there_are_not(text, target, message):
    with pytest.raises(UnsupportedPtx, match=message) as caught:
        launch(text, 0, target=target)
    assert caught.value.line
