"""Schedules: seeds repeat themselves, policies agree, clusters join when others are stuck."""

from __future__ import annotations

import numpy as np
import pytest

import ptxemu
from ptxemu import Options
from ptxemu.machine import scheduler
from tests.ptxemu.ptx_program import FOLDER, POLICIES, check, emulate, read
from tests.ptxemu.test_errors import kernel

# every warp appends its number to a log, in the order in which the schedule lets them run
LOG = kernel(
    """
ld.param.u64 %rd1, [log];
mov.u32 %r0, %tid.x;
shr.u32 %r1, %r0, 5;
and.b32 %r2, %r0, 31;
setp.ne.u32 %p0, %r2, 0;
mov.u32 %r5, 0;
AGAIN:
@%p0 bra SKIP;
atom.global.add.u32 %r3, [%rd1], 1;
mad.wide.u32 %rd2, %r3, 4, %rd1;
st.global.b32 [%rd2+4], %r1;
SKIP:
add.u32 %r5, %r5, 1;
setp.lt.u32 %p1, %r5, 6;
@%p1 bra AGAIN;
""",
    ".param .u64 log",
)


def order(**options: object) -> list[int]:
    log = np.zeros(1 + 4 * 6, np.uint32)
    ptxemu.load(LOG).launch(
        grid=(1,),
        block=(128,),
        params=[log.ctypes.data.to_bytes(8, "little")],
        memory=[log],
        options=Options(**options),
    )
    assert log[0] == 24
    return log[1:].tolist()


def test_round_robin_is_one_schedule() -> None:
    assert order() == order() == sorted(order())


def test_equal_seeds_give_equal_schedules_and_others_differ() -> None:
    runs = {seed: order(policy="random", seed=seed) for seed in range(6)}
    assert all(order(policy="random", seed=seed) == run for seed, run in runs.items())
    assert len({tuple(run) for run in runs.values()}) > 1


@pytest.mark.parametrize(
    "name",
    ["async_copy", "bulk_copy", "tensor_2d", "tcgen05_mma", "mbarrier_phases", "tmem_interlock"],
)
def test_results_do_not_depend_on_the_schedule(name: str) -> None:
    program = read(FOLDER / f"{name}.ptx")
    module = ptxemu.load(program.text)
    for policy in POLICIES:
        for seed in range(4):
            check(program, emulate(program, module, Options(policy=policy, seed=seed)))


def test_counts_do_not_depend_on_the_schedule() -> None:
    text = kernel(
        "mov.u32 %r1, 0;\nL:\nadd.u32 %r1, %r1, 1;\nsetp.lt.u32 %p0, %r1, 10;\n@%p0 bra L;"
    )
    reports = [
        ptxemu.load(text).launch(grid=(3,), block=(64,), options=Options(policy=policy))
        for policy in POLICIES
    ]
    for report in reports:
        assert report.by_warp[0]["add.u32"] == 30
        assert report.by_warp[1]["setp.lt.u32"] == 30
        assert report.warp_instructions == 6 * (1 + 3 * 10 + 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_clusters_join_when_those_resident_wait_for_them(policy: str) -> None:
    """Every CTA waits until all have come: they must be resident together."""
    count = np.zeros(1, np.uint32)
    text = kernel(
        """ld.param.u64 %rd1, [count];
atom.global.add.u32 %r1, [%rd1], 32;
W:
ld.acquire.gpu.global.b32 %r2, [%rd1];
setp.lt.u32 %p0, %r2, 6144;
@%p0 bra W;""",
        ".param .u64 count",
    )
    ptxemu.load(text).launch(
        grid=(6,),
        block=(32,),
        params=[count.ctypes.data.to_bytes(8, "little")],
        memory=[count],
        options=Options(policy=policy, resident=1),
    )
    assert count[0] == 6144


def test_progress_is_reported_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_CHECK_SECONDS", 0.01)
    seen: list[tuple[int, int]] = []
    text = kernel(
        "mov.u32 %r1, 0;\nL:\nadd.u32 %r1, %r1, 1;\nsetp.lt.u32 %p0, %r1, 30000;\n@%p0 bra L;"
    )
    ptxemu.load(text).launch(
        grid=(60,),
        block=(32,),
        options=Options(progress=lambda *done: seen.append(done), limit=None),
    )
    assert seen
    assert all(total == 60 for _, total in seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
