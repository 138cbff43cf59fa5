"""Group 8: boxes of a tensor map, and plain bulk copies, between global and shared memory."""

from __future__ import annotations

from collections.abc import Iterator

from lab.silicon.units.benchmark import ALL_BYTES, CYCLES, Benchmark, Point
from lab.silicon.units.ptx import Kernel, Map, Memory, Role

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PITCH = 4096  # bytes between rows of the tensor: of so many columns
DATA = 1024  # where slots begin, behind their barriers
MOST_SMEM = 227 * KIB
WARM_BYTES, COLD_BYTES = 8 * MIB, GIB
PER_ROW = "cycles per row"
BULK = 0  # rows of what is no box


def _log(number: int) -> int:
    return number.bit_length() - 1


def place(width: int, rows: int, nbytes: int) -> str:
    """%r_x, %r_y, and for bulk copies %d_from: of box or piece %r_b, of those in so many bytes, in
    the order of the tensor's columns. The next one is %r_step further on."""
    if rows == BULK:
        return f"""\
and.b32 %r_b, %r_b, {nbytes // width - 1};
mad.wide.u32 %d_from, %r_b, {width}, %d_mem;
add.u32 %r_b, %r_b, %r_step;"""
    return f"""\
and.b32 %r_b, %r_b, {nbytes // (width * rows) - 1};
and.b32 %r_x, %r_b, {PITCH // width - 1};
mul.lo.u32 %r_x, %r_x, {width};
shr.u32 %r_y, %r_b, {_log(PITCH // width)};
mul.lo.u32 %r_y, %r_y, {rows};
add.u32 %r_b, %r_b, %r_step;"""


def load(to: str, barrier: str, width: int, rows: int, mask: str = "") -> str:
    """Load a box or piece at `place`."""
    done = "mbarrier::complete_tx::bytes"
    if rows == BULK:
        return (
            f"cp.async.bulk.shared::cluster.global.{done} [{to}], [%d_from], {width}, [{barrier}];"
        )
    cast, more = (".multicast::cluster", f", {mask}") if mask else ("", "")
    return (
        f"cp.async.bulk.tensor.2d.shared::cluster.global.tile.{done}{cast}"
        f" [{to}], [%d_map, {{%r_x, %r_y}}], [{barrier}]{more};"
    )


def _initialise(stages: int) -> str:
    lines = ["setp.eq.u32 %p_zero, %r_tid, 0;", "mov.u32 %r_parity, 0;"]
    lines += [f"@%p_zero mbarrier.init.shared::cta.b64 [%r_smem+{8 * s}], 1;"
              for s in range(stages)]  # fmt: skip
    return "\n".join([*lines, "fence.mbarrier_init.release.cluster;"])


def _expect(stage: int, nbytes: int) -> str:
    return f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r_smem+{8 * stage}], {nbytes};"


def _wait(stage: int, label: str) -> str:
    return (
        f"WAIT{label}: mbarrier.try_wait.parity.shared::cta.b64 %p_done, [%r_smem+{8 * stage}],"
        f" %r_parity;\n@!%p_done bra WAIT{label};"
    )


START = "mov.u32 %r_b, %r_cta;\nmov.u32 %r_step, %r_ctas;"


SHARED = """\
div.u32 %r_step, %r_ctas, {readers};
{place}"""
TOGETHER = "div.u32 %r_b, %r_cta, {readers};"
APART = "rem.u32 %r_b, %r_cta, %r_step;"


def ring(
    width: int,
    rows: int,
    stages: int,
    *,
    cold: bool,
    per_sm: bool = False,
    swizzle: str = "none",
    start: str = START,
) -> Kernel:
    """Keep `stages` boxes in flight with one thread: wait for the oldest and request the next.
    Each round of the loop covers all stages once.

    start: where a CTA begins, and its step."""
    nbytes, size = COLD_BYTES if cold else WARM_BYTES, width * max(rows, 1)
    filling, passing, last = [], [], []
    for stage in range(stages):
        to, barrier = f"%r_to{stage}", f"%r_full{stage}"
        once = [_expect(stage, size), place(width, rows, nbytes), load(to, barrier, width, rows)]
        filling += [f"add.u32 {to}, %r_smem, {DATA + stage * size};",
                    f"add.u32 {barrier}, %r_smem, {8 * stage};", *once]  # fmt: skip
        passing += [_wait(stage, f"A{stage}"), *once]
        last.append(_wait(stage, f"B{stage}"))
    passing.append("xor.b32 %r_parity, %r_parity, 1;")
    role = Role("\n".join(passing), single=True, before=start, begin="\n".join(filling),
                drain="\n".join(last))  # fmt: skip
    box = Map(width, rows, PITCH, swizzle) if rows != BULK else None
    return Kernel((role,), _initialise(stages), smem=DATA + stages * size, per_sm=per_sm,
                  memory=Memory(nbytes, cold), map=box)  # fmt: skip


def _fits(size: int, stages: int) -> bool:
    return DATA + size * stages <= MOST_SMEM


SHAPES = (
    *((128, rows, "128B") for rows in (8, 16, 32, 64, 128, 256)),
    *((128, rows, "none") for rows in (8, 64, 256)),
    *((width, rows, "none") for width in (32, 64) for rows in (8, 64, 256)),
)


def latencies() -> Iterator[Benchmark]:
    """Time boxes one after the other, from expect_tx to the end of the wait; also bulk copies."""
    sizes = [(size, BULK, "none") for size in (1024, 4096, 16384, 32768)]
    for cold in (False, True):
        for width, rows, swizzle in (*SHAPES, *sizes):
            made = ring(width, rows, 1, cold=cold, swizzle=swizzle)
            points = tuple(Point(made, count, count) for count in (64, 192))
            variant = {"width": width, "rows": rows, "swizzle": swizzle}
            name = f"tma_latency_{'hbm' if cold else 'l2'}"
            if rows == BULK:
                name, variant = name.replace("tma", "bulk"), {"nbytes": width}
            yield Benchmark("tma", name, variant, CYCLES, points)


def throughput() -> Iterator[Benchmark]:
    """Cycles per row of one SM with 2, 4, 8 boxes in flight; bytes per cycle of bulk copies."""
    for width, rows, swizzle in SHAPES:
        for stages in (2, 4, 8):
            if _fits(width * rows, stages):
                made = ring(width, rows, stages, cold=False, swizzle=swizzle)
                points = _in_rounds(made, 1 * MIB, width * rows * stages, rows * stages)
                variant = {"width": width, "rows": rows, "swizzle": swizzle, "stages": stages}
                yield Benchmark("tma", "tma_row", variant, PER_ROW, points)
    for size in (1024, 4096, 16384, 32768):
        for stages in (2, 4):
            made = ring(size, BULK, stages, cold=False)
            points = _in_rounds(made, 1 * MIB, size * stages, stages)
            variant = {"nbytes": size, "stages": stages}
            yield Benchmark("tma", "bulk_copy", variant, "cycles per copy", points)


def _in_rounds(made: Kernel, total: int, per_round: int, operations: float) -> tuple[Point, ...]:
    count = max(total // per_round, 4)
    return tuple(Point(made, c, c * operations) for c in (count, 2 * count))


FLIGHT = ((4096, 1), (4096, 2), (8192, 2), (8192, 4), (8192, 8), (16384, 8), (16384, 12))


def all_sms() -> Iterator[Benchmark]:
    """All SMs together, by bytes in flight in each."""
    for cold in (False, True):
        for size, stages in FLIGHT:
            for width in (128,) if stages == 1 else (128, 64):
                made = ring(width, size // width, stages, cold=cold, per_sm=True,
                            swizzle="128B" if width == 128 else "none")  # fmt: skip
                points = _in_rounds(made, 2 * MIB, size * stages, size * stages)
                variant = {"form": "tma", "kib_in_flight": size * stages // KIB, "width": width,
                           "rows": size // width, "stages": stages, "sms": "all"}  # fmt: skip
                name = f"{'hbm' if cold else 'l2'}_bytes_per_cycle"
                yield Benchmark("bandwidth", name, variant, ALL_BYTES, points, 1, True)
    for readers in (2, 4, 12, 33, 132):  # of the same boxes, next to each other or not
        for who, begin in (("next", TOGETHER), ("apart", APART)):
            start = SHARED.format(readers=readers, place=begin.format(readers=readers))
            made = ring(128, 64, 12, cold=False, per_sm=True, swizzle="128B", start=start)
            points = _in_rounds(made, 2 * MIB, 8192 * 12, 8192 * 12)
            variant = {"form": "tma", "kib_in_flight": 96, "width": 128, "rows": 64, "stages": 12,
                       "sms": "all", "readers": readers, "who": who}  # fmt: skip
            yield Benchmark("bandwidth", "l2_bytes_per_cycle", variant, ALL_BYTES, points, 1, True)


# -- issue, multicast, stores ---------------------------------------------------------------------


def issue() -> Iterator[Benchmark]:
    """Cycles between instructions that one thread sends: from a clock before to one behind."""
    for width, rows in ((32, 8), (128, 8), (128, 64)):
        for steps in ((2, 4), (4, 8), (8, 16)):
            points = tuple(Point(_issued(width, rows, some), 64, 64 * some) for some in steps)
            variant = {"width": width, "rows": rows, "instructions": steps[1]}
            yield Benchmark("tma", "tma_issue", variant, "cycles per instruction", points)


def _issued(width: int, rows: int, steps: int) -> Kernel:
    one = load("%r_to", "%r_smem", width, rows)
    body = [place(width, rows, WARM_BYTES), _expect(0, width * rows * steps)]
    body += ["mov.u64 %d_t, %clock64;", "add.u64 %d_begin, %d_begin, %d_t;"]
    body += [one] * steps
    body += ["mov.u64 %d_t, %clock64;", "add.u64 %d_end, %d_end, %d_t;"]
    body += [_wait(0, "A"), "xor.b32 %r_parity, %r_parity, 1;"]
    before = f"{START}\nadd.u32 %r_to, %r_smem, {DATA};"
    role = Role("\n".join(body), single=True, before=before, inside=True)
    return Kernel((role,), _initialise(1), smem=DATA + width * rows, memory=Memory(WARM_BYTES),
                  map=Map(width, rows, PITCH))  # fmt: skip


def multicast() -> Iterator[Benchmark]:
    """Boxes that CTA 0 sends to all of its cluster: until its own part is there, in rounds."""
    for cluster in (1, 2, 4):
        for rows in (8, 64, 128):
            for steps in ((1,), (2, 4)):
                points = tuple(
                    Point(_spread(cluster, rows, some), 64, 64 * (some * rows if some > 1 else 1))
                    for some in steps
                )
                name, unit = "tma_multicast_row", PER_ROW
                if steps == (1,):
                    name, unit = "tma_multicast_latency", CYCLES
                variant = {"ctas": cluster, "width": 128, "rows": rows}
                yield Benchmark("tma", name, variant, unit, points)
    for rows in (8, 64):
        made = _there_and_back(rows)
        points = tuple(Point(made, count, count) for count in (64, 128))
        variant = {"width": 128, "rows": rows, "is": "to the other CTA, and an arrival back"}
        yield Benchmark("tma", "tma_remote_round", variant, CYCLES, points)


def _round(cluster: int, rank: int, rows: int, steps: int) -> str:
    """Return a CTA's round: arm its barrier, synchronise with all others, and wait. Only CTA 0
    sends and is timed."""
    width, clock = 128, "mov.u64 %d_t, %clock64;\nadd.u64 %d_{0}, %d_{0}, %d_t;"
    sender, mask = rank == 0, "%h_mask" if cluster > 1 else ""
    met = "barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;"
    body = ["elect.sync %r_w|%p_lead, -1;", f"@!%p_lead bra ARMED{rank};"]
    body += [_expect(0, width * rows * steps), f"ARMED{rank}:"]
    body += [met if cluster > 1 else "bar.warp.sync -1;"]
    if sender:
        body += [place(width, rows, WARM_BYTES), clock.format("begin")]
        body += ["elect.sync %r_w|%p_lead, -1;", f"@!%p_lead bra SENT{rank};"]
        body += [load("%r_to", "%r_smem", width, rows, mask)] * steps
        body.append(f"SENT{rank}:")
    body += [_wait(0, str(rank)), clock.format("end") if sender else ""]
    return "\n".join([*body, "xor.b32 %r_parity, %r_parity, 1;"])


def _spread(cluster: int, rows: int, steps: int) -> Kernel:
    before = f"{START}\nadd.u32 %r_to, %r_smem, {DATA};\nmov.b16 %h_mask, {(1 << cluster) - 1};"
    roles = tuple(
        Role(_round(cluster, rank, rows, steps), before=before, inside=True, timed=rank == 0,
             cta=rank if cluster > 1 else -1)
        for rank in range(cluster)
    )  # fmt: skip
    return Kernel(roles, _initialise(1), grid=cluster, cluster=cluster, smem=DATA + 128 * rows,
                  memory=Memory(WARM_BYTES), map=Map(128, rows, PITCH, "128B"))  # fmt: skip


def _there_and_back(rows: int) -> Kernel:
    """CTA 0 sends a box to CTA 1 alone, which arrives at CTA 0 when it has it."""
    width = 128
    sent = [place(width, rows, WARM_BYTES), load("%r_to", "%r_smem", width, rows, "%h_mask")]
    sent += [_wait(0, "A"), "xor.b32 %r_parity, %r_parity, 1;"]
    before = f"{START}\nadd.u32 %r_to, %r_smem, {DATA};"
    received = [_expect(0, width * rows), _wait(0, "B"), "xor.b32 %r_parity, %r_parity, 1;"]
    received += ["mbarrier.arrive.shared::cluster.b64 _, [%r_remote];"]
    setup = (
        _initialise(1) + "\nmov.b16 %h_mask, 2;\nmapa.shared::cluster.u32 %r_remote, %r_smem, 0;"
    )
    roles = (
        Role("\n".join(sent), before=before, single=True, cta=0),
        Role("\n".join(received), single=True, cta=1, timed=False),
    )
    return Kernel(roles, setup, grid=2, cluster=2, smem=DATA + width * rows,
                  memory=Memory(WARM_BYTES), map=Map(width, rows, PITCH, "128B"))  # fmt: skip


def _stored(width: int, rows: int, steps: int, wait: str, *, per_sm: bool = False) -> Kernel:
    size = width * max(rows, 1)
    body = []
    for step in range(steps):
        body.append(place(width, rows, WARM_BYTES))
        if rows == BULK:
            body.append(
                f"cp.async.bulk.global.shared::cta.bulk_group [%d_from], [%r_from], {width};"
            )
        else:
            body.append(
                "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
                " [%d_map, {%r_x, %r_y}], [%r_from];"
            )
        if wait.endswith("each"):
            body.append("cp.async.bulk.commit_group;")
        body.append(f"xor.b32 %r_from, %r_from, {size};" if step % 2 == 0 else "")
    if not wait.endswith("each"):
        body.append("cp.async.bulk.commit_group;")
    body.append(f"cp.async.bulk.{wait.removesuffix(' each')};")
    before = f"{START}\nadd.u32 %r_from, %r_smem, {max(DATA, 2 * size)};"
    drain = "cp.async.bulk.wait_group 0;"
    role = Role("\n".join(body), before=before, drain=drain, single=True)
    box = Map(width, rows, PITCH, "128B" if width == 128 else "none") if rows != BULK else None
    return Kernel((role,), smem=max(DATA, 2 * size) + 2 * size, per_sm=per_sm,
                  memory=Memory(WARM_BYTES), map=box)  # fmt: skip


def stores() -> Iterator[Benchmark]:
    """Until the source has been read, until it is written, per row of several in a group; all."""
    for width, rows in ((128, 8), (128, 64), (128, 256), (64, 64), (1024, BULK), (16384, BULK)):
        variant = {"width": width, "rows": rows}
        prefix = "tma_store"
        if rows == BULK:
            variant, prefix = {"nbytes": width}, "bulk_store"
        for name, wait in (("read", "wait_group.read 0"), ("latency", "wait_group 0")):
            made = _stored(width, rows, 1, wait)
            points = tuple(Point(made, count, count) for count in (64, 128))
            yield Benchmark("tma", f"{prefix}_{name}", variant, CYCLES, points)
        points = tuple(
            Point(_stored(width, rows, steps, "wait_group 0"), 64, 64 * steps * max(rows, 1))
            for steps in (4, 8)
        )
        unit = "cycles per copy" if rows == BULK else PER_ROW
        yield Benchmark("tma", f"{prefix}_row", variant, unit, points)
    for rows in (32, 128):
        made = _stored(128, rows, 8, "wait_group.read 1", per_sm=True)
        points = _in_rounds(made, 2 * MIB, 128 * rows * 8, 128 * rows * 8)
        variant = {"form": "tma store", "width": 128, "rows": rows, "sms": "all"}
        yield Benchmark(
            "bandwidth", "l2_store_bytes_per_cycle", variant, ALL_BYTES, points, 1, True
        )


def benchmarks() -> Iterator[Benchmark]:
    yield from latencies()
    yield from throughput()
    yield from issue()
    yield from multicast()
    yield from stores()
    yield from all_sms()
