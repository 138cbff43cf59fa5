"""What directives of a kernel ask of its launch: threads of a CTA, CTAs of a cluster.

PTX ISA, "Performance-Tuning Directives", "Cluster Dimension Directives".
"""

from __future__ import annotations

import numpy as np
import pytest

import ptxemu
from ptxemu.errors import HardwareRefusal, PtxEmuError, PtxSyntaxError, UnsupportedPtx
from tests.ptxemu.kernels import kernel, launch

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


# directives, CTAs, cluster of the launch -> what the error names
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


# what ptxas 13.5 does not assemble, and what is not emulated
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
