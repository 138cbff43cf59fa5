"""Groups 7 and 9: loads and cp.async from L1, L2 and HBM, of one SM and of all; atomics, fences."""

from __future__ import annotations

from collections.abc import Iterator

from lab.silicon.units.benchmark import ALL_BYTES, BYTES, CYCLES, PER_SM, Benchmark, Point
from lab.silicon.units.ptx import WARP, Kernel, Memory, Role

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LINE = 512  # bytes of 16 per lane
WARM_BYTES, COLD_BYTES = 16 * MIB, GIB
CHASE = """\
.visible .entry bench(.param .u64 mem, .param .u32 apart, .param .u32 mask)
{
.reg .b32 %r<9>;
.reg .b64 %d<9>;
ld.param.u64 %d0, [mem];
ld.param.u32 %r0, [apart];
ld.param.u32 %r1, [mask];
cvta.to.global.u64 %d1, %d0;
mov.u32 %r2, %ctaid.x;
mov.u32 %r3, %ntid.x;
mov.u32 %r4, %tid.x;
mad.lo.u32 %r5, %r2, %r3, %r4;
mad.lo.u32 %r6, %r5, 1664525, 1013904223;
and.b32 %r6, %r6, %r1;
mad.wide.u32 %d2, %r6, %r0, %d0;
mad.wide.u32 %d3, %r5, %r0, %d1;
st.global.u64 [%d3], %d2;
ret;
}
"""


def chases() -> Iterator[Benchmark]:
    """Follow pointers with one lane, in an order without a pattern."""
    places = (
        ("L1", "ca", 8 * KIB, 128, False),
        ("L2", "cg", MIB, 128, False),
        ("L2", "cg", 16 * MIB, 128, False),
        ("L2", "ca", 16 * MIB, 128, False),
        ("HBM", "cg", 64 * MIB, 4 * KIB, True),
        ("HBM", "cg", GIB, 64 * KIB, True),
    )
    for where, cache, nbytes, apart, cold in places:
        points = []
        for steps in (16, 32):
            line = f"ld.global.{cache}.u64 %d_p, [%d_p];\n"
            role = Role(line * steps, single=True, before="mov.b64 %d_p, %d_mem;", sink=("%d_p",))
            made = Kernel((role,), memory=Memory(nbytes, cold, apart))
            points.append(Point(made, 32, 32 * steps))
        name = {"L1": "global_latency_l1", "L2": "global_latency_l2", "HBM": "global_latency_hbm"}
        variant = {"footprint": nbytes, "apart": apart, "cache": cache}
        yield Benchmark("load", name[where], variant, CYCLES, tuple(points))


def lines() -> Iterator[Benchmark]:
    """Loads from L2 whose lanes are so far apart: how long the SM is busy with each."""
    for apart in (4, 16, 32, 128):
        points = []
        for steps in (8, 16):
            loads = "".join(
                f"ld.relaxed.gpu.global.b32 %r{k + 20}, [%d_at + {4096 * k}];\n"
                for k in range(steps)
            )
            uses = "".join(f"xor.b32 %r100, %r100, %r{k + 20};\n" for k in range(steps))
            before = f"mov.b32 %r100, 0;\nmad.wide.u32 %d_at, %r_lane, {apart}, %d_mem;\n"
            before += "mul.wide.u32 %d_w, %r_warp, 32768;\nadd.u64 %d_at, %d_at, %d_w;"
            role = Role(loads + uses, before=before, sink=("%r100",))
            made = Kernel((role,), block=32 * WARP, memory=Memory(2 * MIB))
            points.append(Point(made, 64, 64 * 32 * steps))
        variant = {"apart": apart, "lines": max(apart * WARP // 128, 1), "warps": 32}
        yield Benchmark("load", "issue_global", variant, PER_SM, tuple(points))


def copies() -> Iterator[Benchmark]:
    """cp.async of 16 bytes per lane of one warp, waited for each time."""
    for where, nbytes, apart, cold in (
        ("L2", MIB, 4 * KIB, False),
        ("HBM", 256 * MIB, 68 * KIB, True),
    ):
        before = """\
mad.wide.u32 %d_a, %r_lane, 16, %d_mem;
mad.lo.u32 %r_at, %r_lane, 16, %r_smem;
mov.u32 %r_o, 0;"""
        body = f"""\
and.b32 %r_o, %r_o, {nbytes - 1};
cvt.u64.u32 %d_o, %r_o;
add.u64 %d_o, %d_o, %d_a;
cp.async.cg.shared.global [%r_at], [%d_o], 16;
cp.async.commit_group;
add.u32 %r_o, %r_o, {apart};
cp.async.wait_group 0;"""
        made = Kernel((Role(body, before=before),), smem=KIB, memory=Memory(nbytes, cold))
        points = tuple(Point(made, count, count) for count in (256, 512))
        variant = {"from": where, "form": "cp.async 16 B per lane, wait_group 0"}
        yield Benchmark("load", "copy_latency", variant, CYCLES, points)


# -- bytes in flight ------------------------------------------------------------------------------

# (warps, 16-byte accesses per lane and round): so many bytes in flight, of the whole round
SHAPES = {4: (8, 1), 8: (8, 2), 16: (8, 4), 32: (16, 4), 64: (32, 4), 128: (32, 8)}


def stream(
    form: str, warps: int, steps: int, *, cold: bool, per_sm: bool, readers: int = 1
) -> Kernel:
    """Each round a warp takes the next piece that nobody has, of all warps of all CTAs; so many
    CTAs in a row read the same."""
    piece, nbytes = steps * LINE, COLD_BYTES if cold else WARM_BYTES
    before = f"""\
div.u32 %r_o, %r_cta, {readers};
mad.lo.u32 %r_o, %r_o, {warps}, %r_warp;
mul.lo.u32 %r_o, %r_o, {piece};
div.u32 %r_stride, %r_ctas, {readers};
mul.lo.u32 %r_stride, %r_stride, {warps * piece};
mad.wide.u32 %d_a, %r_lane, 16, %d_mem;
mad.lo.u32 %r_at, %r_lane, 16, %r_smem;
mad.lo.u32 %r_at, %r_warp, {2 * piece}, %r_at;
mov.b32 %r100, 0; mov.b32 %r101, 0; mov.b32 %r102, 0; mov.b32 %r103, 0;"""
    address = f"""\
and.b32 %r_o, %r_o, {nbytes - 1};
cvt.u64.u32 %d_o, %r_o;
add.u64 %d_o, %d_o, %d_a;
add.u32 %r_o, %r_o, %r_stride;"""
    lines, drain = [address], ""
    if form == "cp.async":
        lines += [f"cp.async.cg.shared.global [%r_at+{LINE * k}], [%d_o+{LINE * k}], 16;"
                  for k in range(steps)]  # fmt: skip
        lines += ["cp.async.commit_group;", "cp.async.wait_group 1;",
                  f"xor.b32 %r_at, %r_at, {piece};"]  # fmt: skip
        drain = "cp.async.wait_group 0;"
    else:
        load = "ld.global.cg.v4.b32 {{%r_u{k}, %r_m{k}, %r_q{k}, %r_o{k}}}, [%d_o+{at}];"
        lines += [load.format(k=k, at=LINE * k) for k in range(steps)]
        for k in range(steps):
            lines += [f"xor.b32 %r{100 + i}, %r{100 + i}, %r_{letter}{k};"
                      for i, letter in enumerate("umqo")]  # fmt: skip
    sink = ("%r100", "%r101", "%r102", "%r103") if form != "cp.async" else ()
    role = Role("\n".join(lines), before=before, drain=drain, sink=sink)
    smem = warps * 2 * piece if form == "cp.async" else 0
    return Kernel((role,), block=WARP * warps, per_sm=per_sm, smem=smem,
                  memory=Memory(nbytes, cold))  # fmt: skip


def streams() -> Iterator[Benchmark]:
    """Streams of one SM and of all, from L2 and from HBM, by the bytes that a round has in
    flight."""
    for form in ("ld.global.v4", "cp.async"):
        for per_sm in (False, True):
            for cold in (False, True):
                for kib, (warps, steps) in SHAPES.items():
                    if form == "cp.async":
                        if kib < 8 or kib > 128:
                            continue
                        steps = max(steps // 2, 1)  # two groups are in flight
                        warps = kib * KIB // (2 * steps * LINE)
                        if warps > 32:
                            continue
                    yield _stream(form, kib, warps, steps, cold=cold, per_sm=per_sm)
        for readers in (2, 4, 12, 33, 132):
            yield _stream(form, 64, 32, 4, cold=False, per_sm=True, readers=readers)


def _stream(
    form: str, kib: int, warps: int, steps: int, *, cold: bool, per_sm: bool, readers: int = 1
) -> Benchmark:
    made = stream(form, warps, steps, cold=cold, per_sm=per_sm, readers=readers)
    per_round = warps * steps * LINE
    counts = [max(total // per_round, 1) for total in (2 * MIB, 4 * MIB)]
    points = tuple(Point(made, count, count) for count in counts)
    where = "hbm" if cold else "l2"
    variant = {"form": form, "kib_in_flight": kib, "warps": warps, "sms": "all" if per_sm else 1}
    variant |= {"readers": readers} if readers > 1 else {}
    unit = ALL_BYTES if per_sm else BYTES
    name = f"{where}_bytes_per_cycle"
    return Benchmark("bandwidth", name, variant, unit, points, per_round, per_sm)


# -- atomics and fences ---------------------------------------------------------------------------


def _repeated(
    name: str, line: str, variant: dict, *, setup: str = "", group: str = "atomic", **how: object
) -> Benchmark:
    points = []
    for steps in (8, 16):
        role = Role("\n".join([line.format(o=512 * k, k=k) for k in range(steps)]), **how)
        points.append(Point(Kernel((role,), setup, smem=1024), 32, 32 * steps))
    return Benchmark(group, name, variant, CYCLES, tuple(points))


SPREAD = "mad.wide.u32 %d_at, %r_tid, 4, %d_mem;"
TOGETHER = "and.b32 %r_f, %r_z, 0;\nmad.wide.u32 %d_at, %r_f, 4, %d_mem;"
FENCES = (
    "fence.acq_rel.cta", "fence.acq_rel.cluster", "fence.acq_rel.gpu", "fence.sc.gpu",
    "fence.acq_rel.sys", "fence.proxy.async", "fence.proxy.async.shared::cta",
    "fence.mbarrier_init.release.cluster", "membar.cta", "membar.gl",
)  # fmt: skip


def atomics() -> Iterator[Benchmark]:
    """Chains of atom, streams of red, of one warp; all SMs at one address."""
    chain = {"before": "mov.b32 %r100, %r_y;", "sink": ("%r100",)}
    for form in ("add.u32", "exch.b32", "cas.b32"):
        more = ", %r_z" if form == "cas.b32" else ""
        line = f"atom.global.{form} %r100, [%d_at], %r100{more};"
        for lanes, single in ((1, True), (WARP, False)):
            variant = {"form": f"atom.global.{form}", "lanes": lanes}
            yield _repeated("latency_atomic_global", line, variant, setup=SPREAD, single=single,
                            **chain)  # fmt: skip
    for form in ("add.u32", "exch.b32"):
        line = f"atom.shared.{form} %r100, [%r_smem], %r100;"
        variant = {"form": f"atom.shared.{form}", "lanes": 1}
        yield _repeated("latency_atomic_shared", line, variant, single=True, **chain)
    line = "red.global.add.u32 [%d_at+{o}], %r_y;"
    yield _repeated("red_global", line, {"lanes": WARP, "addresses": WARP}, setup=SPREAD)
    for per_sm in (False, True):
        points = []
        for steps in (8, 16):
            role = Role("red.global.add.u32 [%d_at], %r_y;\n" * steps, single=True)
            made = Kernel((role,), SPREAD, per_sm=per_sm, block=WARP)
            points.append(Point(made, 64, 64 * steps))
        variant = {"form": "red.global.add.u32", "addresses": 1, "sms": "all" if per_sm else 1}
        unit = "operations per cycle" + " of all SMs" * per_sm
        yield Benchmark("atomic", "red_one_address", variant, unit, tuple(points), 1, per_sm)


def fences() -> Iterator[Benchmark]:
    """Time fences in sequence, alone and each after a store of a line."""
    for fence in FENCES:
        yield _repeated("latency_membar", f"{fence};", {"fence": fence, "behind": "nothing"})
        if "init" in fence:
            continue
        line = "st.global.u32 [%d_at], %r_y; " + f"{fence};"
        variant = {"fence": fence, "behind": "a store to global memory"}
        yield _repeated("latency_membar", line, variant, setup=SPREAD)
        line = "mad.lo.u32 %r_at, %r_lane, 4, %r_smem; st.volatile.shared.u32 [%r_at], %r_y; "
        variant = {"fence": fence, "behind": "a store to shared memory"}
        yield _repeated("latency_membar", f"{line}{fence};", variant)
    for what in ("wait", "launch_dependents"):
        yield _repeated("griddepcontrol", f"griddepcontrol.{what};", {"form": what})


def benchmarks() -> Iterator[Benchmark]:
    yield from chases()
    yield from copies()
    yield from lines()
    yield from streams()
    yield from atomics()
    yield from fences()
