"""A CTA of a cluster that exits while its peer still reaches for it: a finding, not a result."""

from __future__ import annotations

import numpy as np
import pytest

from lab.silicon.conformance.ptx_program import aligned_copy
from tests.ptxemu.kernels import DYNAMIC, kernel, launch

# A barrier in each CTA; %p0: not the first thread, %p1: CTA 1.
MEET = """
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, %cluster_ctarank;
    mov.u32 %r2, dynamic;
    setp.ne.u32 %p0, %r0, 0;
    setp.ne.u32 %p1, %r1, 0;
    @!%p0 mbarrier.init.shared.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed.aligned;
    barrier.cluster.wait.aligned;
"""
# CTA 0 arrives on the barrier of CTA 1, or commits to both; CTA 1 exits, with or without waiting.
LEAVE = f"""{MEET}    @%p1 bra PEER;
    @%p0 bra END;
    mov.u32 %r3, 0;
SPIN:
    add.u32 %r3, %r3, 1;
    setp.lt.u32 %p2, %r3, 2000;
    @%p2 bra SPIN;
    SIGNAL
    bra END;
PEER:
    WAIT
END:
"""
WAIT = "mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; @!%p2 bra PEER;"
SIGNALS = {
    "remote arrival": "mapa.shared::cluster.u32 %r4, %r2, 1;\n"
    "mbarrier.arrive.shared::cluster.b64 _, [%r4];",
    "multicast commit": "mov.b16 %h0, 3;\n"
    "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"
    " [%r2], %h0;",
}


def findings(signal: str, wait: str, policy: str, seed: int) -> list[str]:
    body = LEAVE.replace("SIGNAL", SIGNALS[signal]).replace("WAIT", wait)
    how = {"grid": (2,), "cluster": (2,), "smem_bytes": 1024, "policy": policy, "seed": seed}
    report = launch(kernel(body, before=DYNAMIC), **how)
    return [finding.check for finding in report.findings]


@pytest.mark.parametrize("policy", ["round-robin", "random", "adversarial"])
@pytest.mark.parametrize("signal", SIGNALS)
def test_a_signal_into_an_exited_cta_is_found(signal: str, policy: str) -> None:
    """With the wait under no schedule, without it under one of four at least."""
    assert not any(findings(signal, WAIT, policy, seed) for seed in range(4))
    found = [findings(signal, "", policy, seed) for seed in range(4)]
    assert ["exited"] in found
    assert all(checks in ([], ["exited"]) for checks in found)


# CTA 0 expects bytes at the barrier of CTA 1 and copies them there; CTA 1 exits later than that.
COPY = f"""{MEET}    ld.param.u64 %rd0, [input];
    @%p1 bra NEXT;
    @%p0 bra NEXT;
    mapa.shared::cluster.u32 %r4, %r2, 1;
    add.u32 %r5, %r4, 512;
    mov.b16 %h0, 2;
    mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r4], 16;
    ISSUE
NEXT:
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    @!%p1 bra END;
PEER:
    WAIT
END:
"""
COPIES = {
    "bulk load": "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    ".multicast::cluster [%r2+512], [%rd0], 16, [%r2], %h0;",
    "bulk copy": "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    " [%r5], [%r2+512], 16, [%r4];",
}


@pytest.mark.parametrize("copy", COPIES)
def test_bytes_into_an_exited_cta_are_found(copy: str) -> None:
    """They come last of all."""
    how = {"grid": (2,), "cluster": (2,), "smem_bytes": 1024, "policy": "adversarial", "seed": 0}
    for wait, found in ((WAIT, []), ("", ["exited"])):
        body = COPY.replace("ISSUE", COPIES[copy]).replace("WAIT", wait)
        program = kernel(body, ".param .u64 input", DYNAMIC)
        report = launch(program, aligned_copy(np.zeros(16, np.uint32)), **how)
        assert [finding.check for finding in report.findings] == found
