"""Groups 4 and 5: mbarriers and barriers, within a CTA and between those of a cluster."""

from __future__ import annotations

from collections.abc import Iterator

from lab.silicon.units.benchmark import CYCLES, Benchmark, Point
from lab.silicon.units.ptx import WARP, Kernel, Role

ROUNDS = (256, 512)
MANY = (1 << 20) - 1  # arrivals of a phase


def initialise(counts: list[int], cluster: int = 1) -> str:
    """mbarriers at the begin of shared memory, 8 bytes apart, by thread 0."""
    lines = ["setp.eq.u32 %p_zero, %r_tid, 0;"]
    for place, count in enumerate(counts):
        lines.append(f"@%p_zero mbarrier.init.shared::cta.b64 [%r_smem+{8 * place}], {count};")
    lines.append("mov.u32 %r_parity, 0;")
    lines.append("setp.eq.u32 %p_lead, %r_lane, 0;")
    if cluster > 1:
        lines.append("fence.mbarrier_init.release.cluster;")
    return "\n".join(lines)


def wait(barrier: int, label: str, how: str = "try_wait", scope: str = "cta") -> str:
    """All lanes wait for the phase of %r_parity of a barrier, by its place."""
    order = "" if scope == "cta" else f".acquire.{scope}"
    return (
        f"WAIT{label}:\n"
        f"mbarrier.{how}.parity{order}.shared::cta.b64 %p_done, [%r_smem+{8 * barrier}], "
        f"%r_parity;\n"
        f"@!%p_done bra WAIT{label};"
    )


TURN = "xor.b32 %r_parity, %r_parity, 1;"


def arrive(barrier: int) -> str:
    return f"@%p_lead mbarrier.arrive.shared::cta.b64 _, [%r_smem+{8 * barrier}];"


def _steps(name: str, line: str, setup: str, variant: dict, *, single: bool = False) -> Benchmark:
    """Time the cycles of a line in a loop, from loops of 16 and 32 lines."""
    points = []
    for count in (16, 32):
        body = "\n".join(line.replace("{k}", str(k)) for k in range(count))
        role = Role(body, single=single)
        points.append(Point(Kernel((role,), setup, smem=1024), 64, 64 * count))
    return Benchmark("mbarrier", name, variant, CYCLES, tuple(points))


# a wait that is satisfied: the parity of the phase before the first
_READY = (
    "mbarrier.{how}.parity.shared::cta.b64 %p_s{k}, [%r_a], 1;"
    " selp.b32 %r_a, %r_a, %r_other, %p_s{k};"
)
_READY_BRANCH = (
    "AGAIN{k}: mbarrier.{how}.parity.shared::cta.b64 %p_s{k}, [%r_smem], 1; @!%p_s{k} bra AGAIN{k};"
)


_ARRIVALS = {
    "arrive": "mbarrier.arrive.shared::cta.b64 _, [%r_smem+{at}];",
    "arrive, its state stored": "mbarrier.arrive.shared::cta.b64 %d_s{k}, [%r_smem+{at}];"
    " st.volatile.shared.b64 [%r_smem+64], %d_s{k};",
    "arrive.expect_tx": "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r_smem+{at}], 0;",
    "expect_tx": "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r_smem+{at}], 0;",
}


def alone() -> Iterator[Benchmark]:
    """Measure what one warp does to a barrier."""
    setup = initialise([MANY, 1])
    for form, text in _ARRIVALS.items():
        for completes in (False, True):
            for lanes in (1, WARP):
                if lanes > 1 and (form != "arrive" or completes):
                    continue
                if form == "expect_tx" and not completes:  # the compiler would merge them
                    continue
                variant = {"form": form, "completes": completes, "lanes": lanes}
                line = text.replace("{at}", str(8 * completes))
                name = "mbarrier_arrive_issue"
                yield _steps(name, line, setup, variant, single=lanes == 1)
    more = "\nadd.u32 %r_a, %r_smem, 0;\nadd.u32 %r_other, %r_smem, 8;"
    for how in ("try_wait", "test_wait"):
        text, variant = _READY.replace("{how}", how), {"form": how, "chain": "selp of the address"}
        yield _steps("mbarrier_ready", text, setup + more, variant)
        text, variant = _READY_BRANCH.replace("{how}", how), {"form": how, "chain": "branch"}
        yield _steps("mbarrier_ready", text, setup, variant)


def _both(name: str, kernel: Kernel, variant: dict, per_round: float) -> Benchmark:
    points = tuple(Point(kernel, count, count * per_round) for count in ROUNDS)
    group = "barrier" if "barrier" in name and "mbarrier" not in name else "mbarrier"
    return Benchmark(group, name, variant, CYCLES, points)


def ping_pong() -> Iterator[Benchmark]:
    """Time half a round of two warps: each arrives on a barrier and waits at the other's. In a
    cluster, the warps are in two CTAs, and arrivals are remote."""
    for how in ("try_wait", "test_wait"):
        for other in (1, 4):
            first = Role("\n".join([arrive(0), wait(1, "A", how), TURN]), last=1)
            body = "\n".join([wait(0, "B", how), arrive(1), TURN])
            second = Role(body, first=other, last=other + 1)
            block = WARP * (other + 1)
            made = Kernel((first, second), initialise([1, 1]), block, smem=1024)
            variant = {"wait": how, "schedulers": 1 if other == 4 else 2}
            yield _both("mbarrier_ping_pong", made, variant, 2)
    for order in ORDERS:
        for how in ("try_wait", "test_wait") if order == ORDERS[0] else ("try_wait",):
            yield _remote(order, how)
        yield _remote(order, "try_wait", WARP)
        line = f"mbarrier.arrive{order}.shared::cluster.b64 _, [%r_remote];"
        points = []
        for steps in (16, 32):
            role = Role("\n".join([line] * steps), cta=0, single=True)
            made = Kernel((role,), REMOTE.format(MANY), grid=2, cluster=2, smem=1024)
            points.append(Point(made, 64, 64 * steps))
        variant = {"form": f"remote arrive{order}", "completes": False, "lanes": 1}
        yield Benchmark("mbarrier", "mbarrier_arrive_issue", variant, CYCLES, tuple(points))


ORDERS = ("", ".release.cluster")
REMOTE = """\
setp.eq.u32 %p_zero, %r_tid, 0;
@%p_zero mbarrier.init.shared::cta.b64 [%r_smem], {};
mov.u32 %r_parity, 0;
setp.eq.u32 %p_lead, %r_lane, 0;
fence.mbarrier_init.release.cluster;
xor.b32 %r_peer, %r_rank, 1;
mapa.shared::cluster.u32 %r_remote, %r_smem, %r_peer;"""


def _remote(order: str, how: str, lanes: int = 1) -> Benchmark:
    """Measure a remote arrival.

    order: order of the arrival; with cluster scope, the wait acquires with that scope, too.
    lanes: number of arriving lanes of the warp, one or all."""
    remote = f"mbarrier.arrive{order}.shared::cluster.b64 _, [%r_remote];"
    remote = f"@%p_lead {remote}" if lanes == 1 else remote
    waited = [wait(0, "$", how, "cluster" if order else "cta"), TURN]
    first = Role("\n".join([remote, *waited]).replace("$", "A"), cta=0)
    second = Role("\n".join([*waited, remote]).replace("$", "B"), cta=1)
    made = Kernel((first, second), REMOTE.format(lanes), grid=2, cluster=2, smem=1024)
    variant = {"wait": how, "arrive": order or "as by default"}
    variant |= {"lanes": lanes} if lanes > 1 else {}
    return _both("mbarrier_ping_pong_remote", made, variant, 2)


def wake() -> Iterator[Benchmark]:
    """Time from the clock before an arrival to the clock after the wait of a warp of the same
    SM, which has waited for `delay` cycles by then. The cost of the clock is included once."""
    for how in ("try_wait", "test_wait"):
        for delay in (0, 500, 5000, 50000):
            made = Kernel(_wake_roles(how, delay), initialise([1]), 2 * WARP, smem=1024)
            points = (Point(made, 32, 32),)
            variant = {"wait": how, "asleep_for": delay}
            yield Benchmark("mbarrier", "mbarrier_wake", variant, CYCLES, points)


def _wake_roles(how: str, delay: int) -> tuple[Role, Role]:
    arriving = f"""\
mov.u64 %d_until, %clock64;
add.u64 %d_until, %d_until, {delay};
SPIN:
mov.u64 %d_t, %clock64;
setp.lt.u64 %p_early, %d_t, %d_until;
@%p_early bra SPIN;
mov.u64 %d_t, %clock64;
{arrive(0)}
add.u64 %d_begin, %d_begin, %d_t;
bar.sync 1, 64;"""
    woken = "\n".join(
        [wait(0, "W", how), "mov.u64 %d_t, %clock64;", "add.u64 %d_end, %d_end, %d_t;", TURN,
         "bar.sync 1, 64;"]
    )  # fmt: skip
    return Role(arriving, last=1, inside=True), Role(woken, first=1, last=2, inside=True)


def barriers() -> Iterator[Benchmark]:
    """bar.sync of so many warps; a pair of bar.arrive and bar.sync; barriers of clusters."""
    for warps in (1, 2, 4, 8, 16, 32):
        points = tuple(
            Point(Kernel((Role("bar.sync 1;\n" * steps),), block=WARP * warps), 64, 64 * steps)
            for steps in (16, 32)
        )
        yield Benchmark("barrier", "named_barrier", {"warps": warps}, CYCLES, points)
    for other in (1, 4):
        first = Role("bar.arrive 1, 64;\nbar.sync 2, 64;", last=1)
        second = Role("bar.sync 1, 64;\nbar.arrive 2, 64;", first=other, last=other + 1)
        made = Kernel((first, second), block=WARP * (other + 1))
        variant = {"schedulers": 1 if other == 4 else 2}
        yield _both("named_barrier_ping_pong", made, variant, 2)
    for cluster in (2, 4, 8, 16):
        for order in ("", ".relaxed"):
            for warps in (1, 4, 12):
                if warps != 4 and (order or cluster not in (2, 4)):
                    continue
                yield _cluster(cluster, order, warps)


def _cluster(cluster: int, order: str, warps: int) -> Benchmark:
    line = f"barrier.cluster.arrive{order}.aligned;\nbarrier.cluster.wait.aligned;\n"
    points = tuple(
        Point(Kernel((Role(line * steps),), block=WARP * warps, grid=cluster, cluster=cluster), 64,
              64 * steps)
        for steps in (8, 16)
    )  # fmt: skip
    variant = {"ctas": cluster, "arrive": order.lstrip(".") or "release", "warps": warps}
    return Benchmark("barrier", "cluster_barrier", variant, CYCLES, points)


def benchmarks() -> Iterator[Benchmark]:
    yield from alone()
    yield from ping_pong()
    yield from wake()
    yield from barriers()
