"""What a run shows: arrivals that nobody waits for, and the last bulk waits of a warp."""

from __future__ import annotations

import numpy as np

import ptxemu
from workbench.mutation.observe import observe

KERNEL = """
.version 8.8
.target sm_100a
.address_size 64
.visible .entry kernel(.param .u64 out)
{
	.reg .pred %p<4>;
	.reg .b32 %r<9>;
	.reg .b64 %rd<9>;
	.shared .align 8 .b8 bar[8];
	.shared .align 16 .b8 data[32];
	mov.u32 %r3, bar;
	mov.u32 %r4, data;
	ld.param.u64 %rd1, [out];
	elect.sync %r1|%p1, -1;
	@!%p1 bra END;
	mbarrier.init.shared.b64 [%r3], 1;
	mbarrier.arrive.shared.b64 %rd2, [%r3]; // heard
	mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0;
	mbarrier.arrive.shared.b64 %rd2, [%r3]; // unheard
	st.shared.b32 [%r4], 7;
	fence.proxy.async.shared::cta;
	cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r4], 16;
	cp.async.bulk.commit_group;
	cp.async.bulk.wait_group.read 0; // followed by a store
	st.shared.b32 [%r4+16], 7;
	fence.proxy.async.shared::cta;
	cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r4+16], 16;
	cp.async.bulk.commit_group; // last
	cp.async.bulk.wait_group.read 0; // last
END:
	ret;
}
"""


def test_what_a_run_shows():
    out = np.zeros(64, np.uint8)
    start = -out.ctypes.data % 16
    address = (out.ctypes.data + start).to_bytes(8, "little")

    def run(options):
        ptxemu.load(KERNEL).launch(grid=(1,), block=(32,), params=[address], options=options)

    observed = observe(run)
    lines = KERNEL.split("\n")
    assert [lines[line - 1].partition("// ")[2] for line in sorted(observed.unheard)] == ["unheard"]
    assert [lines[line - 1].partition("// ")[2] for line in sorted(observed.last)] == ["last"] * 2
    assert out[start] == 7
