"""try_cancel may fail although clusters are left: they then run as ordinary ones. Who takes over
how much when a launch is recorded, for a model of time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lab.silicon.conformance import ptx_program
from ptxemu.record.recording import SEND
from tests.ptxemu.kernels import launch

CLUSTERS = 9
_COUNTED = "atom.global.add.u32 %r50, [%rd0+36], 1;\n"


def program() -> str:
    return (ptx_program.FOLDER / "cluster_cancel.ptx").read_text()


def starts(policy: str, seed: int) -> int:
    """How many CTAs were launched; each piece of work has to be done once, whoever does it."""
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
    """Cluster -> how often it asked for another one's work, in a launch that is recorded."""
    out = np.zeros(CLUSTERS, np.uint32)
    how = {"record": True, "clusters": clusters, "resident": resident}
    recording = launch(program(), out, grid=(CLUSTERS,), smem_bytes=128, **how).recording
    assert recording.places == (resident or CLUSTERS)
    counts = {
        warp.cluster: sum(event.what == SEND for event in warp.events) for warp in recording.warps
    }
    assert (out <= 1).all()
    assert sum(out) == sum(counts.values())  # the last request of each is in vain
    return counts


def test_recorded_as_many_are_there_as_a_gpu_has_room_for():
    assert asked() == dict.fromkeys(range(CLUSTERS), 1)


def test_recorded_each_takes_as_much_of_the_rest_as_any_other():
    assert asked(resident=4) == {0: 3, 1: 2, 2: 2, 3: 2}


def test_those_of_a_sample_take_what_they_would_have_had_among_all():
    """Of four places two are executed, and two of the five that are left."""
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
    """cuDNN's attention does."""
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
