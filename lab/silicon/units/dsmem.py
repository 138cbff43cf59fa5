"""Group 6: shared memory of another CTA of the cluster."""

from __future__ import annotations

from collections.abc import Iterator

from lab.silicon.units.benchmark import BYTES, CYCLES, Benchmark, Point
from lab.silicon.units.ptx import WARP, Kernel, Role
from lab.silicon.units.sync import ROUNDS, TURN, wait

DATA = 1024  # where data begins, behind barriers
WIDTHS = {"b32": 4, "v4.b32": 16}
PAIR = {"grid": 2, "cluster": 2}
SETUP = f"""\
setp.eq.u32 %p_zero, %r_tid, 0;
@%p_zero mbarrier.init.shared::cta.b64 [%r_smem], 1;
mov.u32 %r_parity, 0;
fence.mbarrier_init.release.cluster;
xor.b32 %r_peer, %r_rank, 1;
mapa.shared::cluster.u32 %r_remote, %r_smem, %r_peer;
shl.b32 %r_at, %r_lane, 4;
add.u32 %r_at, %r_at, %r_smem;
add.u32 %r_at, %r_at, {DATA};
mapa.shared::cluster.u32 %r_far, %r_at, %r_peer;
mapa.shared::cluster.u32 %r_self, %r_at, %r_rank;
and.b32 %r_turn, %r_never, 16;
setp.eq.u32 %p_lead, %r_lane, 0;"""

_POINTERS = f"""
st.shared.b32 [%r_at], %r_self;
mov.b32 %r_start, %r_far;
cvt.u64.u32 %d_at, %r_at;
cvta.shared.u64 %d_at, %d_at;
add.u64 %d_at, %d_at, {DATA};
mapa.u64 %d_self, %d_at, %r_rank;
mapa.u64 %d_start, %d_at, %r_peer;
st.u64 [%d_at], %d_self;"""


def _values(kind: str) -> str:
    return "%r_y" if kind == "b32" else "{%r_y, %r_z, %r_y, %r_z}"


def _dsmem(
    name: str, variant: dict, unit: str, points: list[Point], nbytes: float = 0
) -> Benchmark:
    return Benchmark("dsmem", name, variant, unit, tuple(points), nbytes)


def loads() -> Iterator[Benchmark]:
    """A chain of pointers in the other CTA; independent loads."""
    for kind in WIDTHS:
        if kind == "b32":
            yield _chain("generic, 64-bit pointers", "ld.u64 %d_p, [%d_p];\n", "%d_p")
            yield _chain("ld.shared::cluster.u32", "ld.shared::cluster.u32 %r_p, [%r_p];\n", "%r_p")
        for warps in (1, 4, 16):
            points = []
            for steps in (8, 16):
                sums = ("%r100", "%r101", "%r102", "%r103")
                start = "\n".join(f"mov.b32 {name}, 0;" for name in sums)
                role = Role(_independent(kind, steps), cta=0, before=start, sink=sums)
                made = Kernel((role,), SETUP, WARP * warps, smem=DATA + 512 * 17, **PAIR)
                points.append(Point(made, 64, 64 * steps * warps))
            variant = {"form": f"ld.{kind}", "warps": warps, "both_ways": False}
            yield _dsmem("dsmem_rate", variant, BYTES, points, WARP * WIDTHS[kind])


def _chain(form: str, line: str, pointer: str) -> Benchmark:
    start = f"mov.b{64 if pointer[1] == 'd' else 32} {pointer}, {pointer[:2]}_start;"
    points = []
    for steps in (16, 32):
        role = Role(line * steps, before=start, sink=(pointer,), cta=0)
        points.append(Point(Kernel((role,), SETUP + _POINTERS, smem=4096, **PAIR), 64, 64 * steps))
    return _dsmem("dsmem_latency", {"form": form, "lanes": WARP}, CYCLES, points)


def _independent(kind: str, steps: int) -> str:
    lines = []
    for k in range(steps):
        to = f"%r_u{k}" if kind == "b32" else f"{{%r_u{k}, %r_m{k}, %r_q{k}, %r_o{k}}}"
        lines.append(f"ld.shared::cluster.{kind} {to}, [%r_far+{512 * k}];")
    names = "u" if kind == "b32" else "umqo"
    for k in range(steps):
        lines += [f"xor.b32 %r{100 + i}, %r{100 + i}, %r_{name}{k};"
                  for i, name in enumerate(names)]  # fmt: skip
    return "\n".join([*lines, "xor.b32 %r_far, %r_far, %r_turn;"])


def stores() -> Iterator[Benchmark]:
    """Stores that nobody waits for, one way and both."""
    for kind, width in WIDTHS.items():
        for warps in (1, 4, 16):
            for both in (False, True):
                points = []
                for steps in (16, 32):
                    body = "\n".join(
                        f"st.shared::cluster.{kind} [%r_far+{512 * k}], {_values(kind)};"
                        for k in range(steps)
                    )
                    role = Role(body, cta=-1 if both else 0)
                    made = Kernel((role,), SETUP, WARP * warps, smem=DATA + 512 * 33, **PAIR)
                    points.append(Point(made, 128, 128 * steps * warps))
                variant = {"form": f"st.{kind}", "warps": warps, "both_ways": both}
                yield _dsmem("dsmem_rate", variant, BYTES, points, WARP * width)


# -- what completes a barrier of the other CTA ----------------------------------------------------


def _expect(nbytes: int) -> str:
    return f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r_smem], {nbytes};"


def _sent(form: str, nbytes: int, step: int = 0) -> str:
    """Return an operation that ends with a complete_tx at the other CTA's barrier."""
    if form == "bulk":
        return (
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
            f" [%r_bulk], [%r_source], {nbytes}, [%r_remote];"
        )
    kind, values = form.removeprefix("st.async."), _values(form.removeprefix("st.async."))
    if kind == "v4.b32":
        kind = "v4.b32"
    return (
        f"st.async.shared::cluster.mbarrier::complete_tx::bytes.{kind} [%r_far+{512 * step}],"
        f" {values}, [%r_remote];"
    )


_BULK = f"""
add.u32 %r_source, %r_smem, {DATA};
add.u32 %r_bulk, %r_remote, {DATA + 32768};"""
FORMS = [*((f"st.async.{kind}", width) for kind, width in WIDTHS.items()),
         *(("bulk", size) for size in (16, 256, 1024, 4096, 16384, 32768))]  # fmt: skip


def _smem(form: str) -> int:
    return DATA + (65536 if form == "bulk" else 512 * 33)


def latencies() -> Iterator[Benchmark]:
    """Half a round of one operation there and one back, each waited for."""
    for form, nbytes in FORMS:
        there, arm = _sent(form, nbytes), _expect(nbytes)
        waiting = [arm, wait(0, "$"), TURN]
        first = Role("\n".join([there, *waiting]).replace("$", "A"), cta=0, single=True)
        second = Role("\n".join([*waiting, there]).replace("$", "B"), cta=1, single=True)
        made = Kernel((first, second), SETUP + _BULK, smem=_smem(form), **PAIR)
        points = [Point(made, count, 2 * count) for count in ROUNDS]
        yield _dsmem("dsmem_async", {"form": form, "nbytes": nbytes}, CYCLES, points)


def rates() -> Iterator[Benchmark]:
    """Rounds of so many operations, whose receiver answers by an arrival."""
    for form, nbytes in FORMS:
        for warps in (1,) if form == "bulk" else (1, 4, 8):
            points = []
            for steps in (4, 8) if form == "bulk" else (16, 32):
                points.append(Point(_burst(form, nbytes, steps, warps), 64, 64 * steps * warps))
            size = nbytes if form == "bulk" else WARP * nbytes
            variant = {"form": form, "nbytes": nbytes, "warps": warps, "both_ways": False}
            yield _dsmem("dsmem_rate", variant, BYTES, points, size)


def _burst(form: str, nbytes: int, steps: int, warps: int) -> Kernel:
    single = form == "bulk"
    total = steps * nbytes * (1 if single else WARP * warps)
    sending = [_sent(form, nbytes, step) for step in range(steps)]
    first = Role("\n".join([*sending, wait(0, "A"), TURN]), cta=0, single=single)
    answer = "mbarrier.arrive.shared::cluster.b64 _, [%r_remote];"
    back = "\n".join([_expect(total), wait(0, "B"), TURN, answer])
    second = Role(back, cta=1, last=1, single=True)
    return Kernel((first, second), SETUP + _BULK, WARP * warps, smem=_smem(form), **PAIR)


def benchmarks() -> Iterator[Benchmark]:
    yield from loads()
    yield from stores()
    yield from latencies()
    yield from rates()
