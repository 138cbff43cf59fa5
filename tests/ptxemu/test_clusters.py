"""Clusters: directives, work that is taken over, CTAs that end early, multicast masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ptxemu
from lab.silicon.conformance import ptx_program
from lab.silicon.conformance.ptx_program import aligned_copy
from ptxemu.errors import HardwareRefusal, PtxEmuError, PtxSyntaxError, UnsupportedPtx
from ptxemu.record.recording import SEND
from tests.ptxemu.kernels import DYNAMIC, kernel, launch

# try_cancel may fail although clusters are left: they then run as ordinary ones. In a recorded
# launch, for a model of time, the clusters that take over work, and how much, are fixed.

CLUSTERS = 9
_COUNTED = "atom.global.add.u32 %r50, [%rd0+36], 1;\n"


def program() -> str:
    return (ptx_program.FOLDER / "cluster_cancel.ptx").read_text()


def starts(policy: str, seed: int) -> int:
    """Count the launched CTAs; each piece of work has to be done exactly once."""
    text = program().replace("NEXT:", f"@%p0 {_COUNTED}NEXT:")
    out = np.zeros(CLUSTERS + 1, np.uint32)
    launch(text, out, grid=(CLUSTERS,), smem_bytes=128, policy=policy, seed=seed, resident=1)
    assert (out[:CLUSTERS] == 1).all()
    return int(out[CLUSTERS])


def test_where_nothing_is_left_to_chance_one_cluster_takes_all_work() -> None:
    assert starts("round-robin", 0) == 1


@pytest.mark.parametrize("policy", ["random", "adversarial"])
def test_a_request_may_fail_while_clusters_are_left(policy: str) -> None:
    counts = {starts(policy, seed) for seed in range(6)}
    assert max(counts) > 1
    assert min(counts) < CLUSTERS


def asked(clusters: Any = None, resident: int | None = None) -> dict[int, int]:
    """Cluster -> number of its requests for the work of another, in a recorded launch."""
    out = np.zeros(CLUSTERS, np.uint32)
    how = {"record": True, "clusters": clusters, "resident": resident}
    recording = launch(program(), out, grid=(CLUSTERS,), smem_bytes=128, **how).recording
    assert recording.places == (resident or CLUSTERS)
    counts = {
        warp.cluster: sum(event.what == SEND for event in warp.events) for warp in recording.warps
    }
    assert (out <= 1).all()
    assert sum(out) == sum(counts.values())  # the last request of each fails
    return counts


def test_recorded_as_many_are_there_as_a_gpu_has_room_for():
    assert asked() == dict.fromkeys(range(CLUSTERS), 1)


def test_recorded_each_takes_as_much_of_the_rest_as_any_other():
    assert asked(resident=4) == {0: 3, 1: 2, 2: 2, 3: 2}


def test_those_of_a_sample_take_what_they_would_have_had_among_all():
    """Two of four places are executed, with two of the five remaining clusters."""
    assert asked(clusters=2, resident=4) == {0: 2, 3: 2}
    assert asked(clusters=[1, 2], resident=4) == {1: 2, 2: 2}
    assert asked(clusters=lambda places: (0, places - 1), resident=4) == {0: 2, 3: 2}


_QUERIES = {
    "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p1, %q0;": (
        "ld.shared.u32 %r5, [%r1+8]; and.b32 %r5, %r5, 1; setp.ne.u32 %p1, %r5, 0;"
    ),
    "clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r2, %q0;": (
        "ld.shared.u32 %r2, [%r1];"
    ),
}
_Y_AND_Z = """clusterlaunchcontrol.query_cancel.get_first_ctaid::y.b32.b128 %r2, %q0;
clusterlaunchcontrol.query_cancel.get_first_ctaid::z.b32.b128 %r5, %q0;
mad.lo.u32 %r2, %r5, 3, %r2;"""


def test_a_response_may_be_read_without_the_queries():
    """cuDNN's attention does this."""
    text = program()
    for query, words in _QUERIES.items():
        assert query in text
        text = text.replace(query, words)
    out = np.zeros(CLUSTERS, np.uint32)
    launch(text, out, grid=(CLUSTERS,), smem_bytes=128, resident=1)
    assert (out == 1).all()


def test_all_axes_of_a_response():
    first, query = "mov.u32 %r2, %ctaid.x;", list(_QUERIES)[1]
    where = "mov.u32 %r2, %ctaid.y; mov.u32 %r5, %ctaid.z; mad.lo.u32 %r2, %r5, 3, %r2;"
    text = program()
    assert first in text
    assert query in text
    out = np.zeros(CLUSTERS, np.uint32)
    text = text.replace(first, where).replace(query, _Y_AND_Z)
    launch(text, out, grid=(1, 3, 3), smem_bytes=128, resident=1)
    assert (out == 1).all()


# Requirements of a kernel's directives on its launch: threads of a CTA, CTAs of a cluster.
#
# PTX ISA, "Performance-Tuning Directives", "Cluster Dimension Directives".

# The number of CTAs in the cluster of each CTA.
_BODY = """ld.param.u64 %rd1, [d]; mov.u32 %r1, %cluster_nctarank; mov.u32 %r2, %ctaid.x;
mad.wide.u32 %rd2, %r2, 4, %rd1; st.global.u32 [%rd2], %r1;"""


def text_of(directives: str, target: str = "sm_100a") -> str:
    text = kernel(_BODY, ".param .u64 d").replace("sm_100a", target)
    return text.replace(")\n{", f")\n{directives}\n{{", 1)


def ranks(directives: str, ctas: int, cluster: tuple[int, ...] | None, **how: object) -> list[int]:
    out = np.zeros(ctas, np.uint32)
    launch(text_of(directives), out, grid=(ctas,), cluster=cluster, **how)
    return out.tolist()


# directives, CTAs, cluster of the launch -> CTAs of a cluster
ALLOWED = [
    ("", 4, None, 1),
    ("", 4, (0, 0, 0), 1),
    (".reqnctapercluster 2, 1, 1", 4, None, 2),
    (".reqnctapercluster 2", 4, None, 2),
    (".reqnctapercluster 2, 1", 4, (2,), 2),
    (".reqnctapercluster 1", 4, None, 1),
    (".explicitcluster .reqnctapercluster 4, 1, 1", 4, None, 4),
    (".explicitcluster", 4, (2, 1, 1), 2),
    (".explicitcluster", 3, (1,), 1),
    (".maxclusterrank 2", 4, (2,), 2),
    (".maxclusterrank 8", 4, None, 1),
    (".explicitcluster .maxclusterrank 4", 8, (4,), 4),
    (".reqnctapercluster 8", 8, None, 8),
    (".reqntid 32 .minnctapersm 2", 4, None, 1),
    (".maxntid 16, 2, 1 .maxnreg 64", 4, None, 1),
]


@pytest.mark.parametrize(("directives", "ctas", "cluster", "wanted"), ALLOWED)
def test_what_is_allowed(directives, ctas, cluster, wanted):
    assert ranks(directives, ctas, cluster) == [wanted] * ctas


@pytest.mark.parametrize(
    ("directives", "cluster", "wanted"),
    [
        ("", None, 0),
        ("", (0, 0, 0), 0),
        ("", (1, 1, 1), 1),  # as on an H200
        ("", (2, 1, 1), 1),
        (".reqnctapercluster 2, 1, 1", None, 1),
        (".explicitcluster", (1, 1, 1), 1),
        (".maxclusterrank 2", None, 0),
    ],
)
def test_a_cluster_is_explicit_where_it_is_named(directives, cluster, wanted):
    text = text_of(directives).replace(
        "mov.u32 %r1, %cluster_nctarank;",
        ".reg .pred %p0; mov.pred %p0, %is_explicit_cluster; selp.u32 %r1, 1, 0, %p0;",
    )
    assert "is_explicit" in text
    out = np.zeros(4, np.uint32)
    launch(text, out, grid=(4,), cluster=cluster)
    assert out.tolist() == [wanted] * 4


# directives, CTAs, cluster of the launch -> text of the error
REFUSED = [
    (".reqnctapercluster 2, 1, 1", 4, (4,), r"cluster=\(4, 1, 1\).*\(2, 1, 1\)"),
    (".reqnctapercluster 2, 1, 1", 4, (1,), r"cluster=\(1, 1, 1\).*reqnctapercluster"),
    (".reqnctapercluster 2, 1, 1", 3, None, r"grid=\(3, 1, 1\) .*cluster=\(2, 1, 1\)"),
    (".reqnctapercluster 1, 2, 1", 4, None, r"grid=\(4, 1, 1\) .*cluster=\(1, 2, 1\)"),
    (".explicitcluster", 4, None, "without a cluster.*explicitcluster"),
    (".explicitcluster .maxclusterrank 4", 4, None, "without a cluster"),
    (".maxclusterrank 2", 4, (4,), "4 CTAs; .* allows 2 .*maxclusterrank"),
    (".reqnctapercluster 16", 16, None, "16 CTAs, of which 8 .*NonPortableClusterSizeAllowed"),
    ("", 9, (9,), "9 CTAs, of which 8 are portable"),
    (".reqntid 64", 4, None, r"block=\(32, 1, 1\).*\(64, 1, 1\) \(.reqntid\)"),
    (".reqntid 16, 2", 4, None, r"\(16, 2, 1\) \(.reqntid\)"),
    (".maxntid 16", 4, None, r"\(16, 1, 1\) \(.maxntid\)"),
]


@pytest.mark.parametrize(("directives", "ctas", "cluster", "words"), REFUSED)
def test_what_the_driver_refuses(directives, ctas, cluster, words):
    with pytest.raises(HardwareRefusal, match=words):
        ranks(directives, ctas, cluster)


def test_clusters_that_are_not_portable_are_a_wish_of_the_host():
    assert ranks(".reqnctapercluster 16", 16, None, non_portable=True) == [16] * 16
    with pytest.raises(HardwareRefusal, match="17 CTAs; at most 16"):
        ranks("", 17, (17,), non_portable=True)


# PTX that ptxas 13.5 does not assemble, and PTX that is not emulated
NOT_PTX = [
    (".reqnctapercluster 2 .maxclusterrank 4", "sm_100a", PtxSyntaxError, "cannot both"),
    (".maxntid 32 .reqntid 32", "sm_100a", PtxSyntaxError, "cannot both"),
    (".reqntid 32, 0, 1", "sm_100a", PtxSyntaxError, "32, 0, 1: every value"),
    (".maxnctapersm 2", "sm_100a", PtxSyntaxError, "unknown directive '.maxnctapersm'"),
    (".blocksareclusters", "sm_100a", UnsupportedPtx, "counts clusters"),
    *[
        (directive, target, UnsupportedPtx, f"{directive.split()[0]} needs sm_90.*{target}")
        for directive in (".reqnctapercluster 2", ".explicitcluster", ".maxclusterrank 2")
        for target in ("sm_80", "sm_89")
    ],
]


@pytest.mark.parametrize(("directives", "target", "kind", "words"), NOT_PTX)
def test_directives_that_are_refused_with_their_line(directives, target, kind, words):
    text = text_of(directives, target)
    with pytest.raises(PtxEmuError, match=words) as caught:
        ptxemu.load(text)
    assert type(caught.value) is kind
    assert directives.split()[0] in text.splitlines()[caught.value.line - 1]


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
    """No schedule has findings with the wait; without it at least one of four does."""
    assert not any(findings(signal, WAIT, policy, seed) for seed in range(4))
    found = [findings(signal, "", policy, seed) for seed in range(4)]
    assert ["exited"] in found
    assert all(checks in ([], ["exited"]) for checks in found)


# CTA 0 expects bytes at the barrier of CTA 1 and copies them there; CTA 1 exits after that.
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
    """The bytes arrive last."""
    how = {"grid": (2,), "cluster": (2,), "smem_bytes": 1024, "policy": "adversarial", "seed": 0}
    for wait, found in ((WAIT, []), ("", ["exited"])):
        body = COPY.replace("ISSUE", COPIES[copy]).replace("WAIT", wait)
        program = kernel(body, ".param .u64 input", DYNAMIC)
        report = launch(program, aligned_copy(np.zeros(16, np.uint32)), **how)
        assert [finding.check for finding in report.findings] == found


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
