"""A mask of CTAs may be a register that lanes have different numbers in."""

from __future__ import annotations

import numpy as np

from tests.ptxemu.kernels import DYNAMIC, kernel, launch

BODY = """
    mov.u32 %r0, %tid.x; mov.u32 %r1, dynamic; ld.param.u64 %rd0, [d];
    setp.eq.u32 %p0, %r0, 0; @!%p0 bra DONE;
    cvt.u16.u32 %h0, %r0; add.u16 %h0, %h0, 1;
    mbarrier.init.shared.b64 [%r1], 1;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 64;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [%r1+64], [%rd0], 64, [%r1], %h0;
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
    @!%p1 bra WAIT;
    ld.shared.u32 %r2, [%r1+64];
    st.global.u32 [%rd0+64], %r2;
DONE:
"""


def test_a_mask_that_differs_between_lanes():
    room = np.zeros(64, np.uint32)
    data = room[-room.ctypes.data % 64 // 4 :][:32]
    data[0] = 7
    launch(kernel(BODY, ".param .u64 d", DYNAMIC), data, smem_bytes=4096)
    assert data[16] == 7
