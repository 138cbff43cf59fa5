"""Tensor memory: tcgen05.ld and tcgen05.st by shape, until their wait and without one; allocation.

A warp reaches the lanes 32 (w % 4) and up, so that four warps use all of them, each from the
scheduler that it is on; each four have columns of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

from lab.silicon.units.benchmark import CYCLES, Benchmark, Point
from lab.silicon.units.ptx import BLACKWELL, SLOT, WARP, Kernel, Role
from lab.silicon.units.tcgen05 import OWN_LANES, WRITTEN, columns_of, looked_at

# registers of a thread, and columns, of each repetition
SHAPES = {"32x32b": (1, 1), "16x64b": (1, 2), "16x128b": (2, 4), "16x256b": (4, 8)}
REPEATS = {
    "32x32b": (1, 8, 16, 32, 64), "16x64b": (16, 32), "16x128b": (8, 16), "16x256b": (1, 2, 4, 8),
}  # fmt: skip
BUDGET, MOST = 64, 8  # registers, and instructions, of the steps of the shorter loop
COUNT = 64
ONE = 0x3F800000  # a float32
LOAD, STORE = "load", "store"
APART = """
shr.u32 %r_group, %r_warp, 2;
mad.lo.u32 %r_lanes, %r_group, {columns}, %r_lanes;"""
WAIT = {LOAD: "tcgen05.wait::ld.sync.aligned;", STORE: WRITTEN}


def access(what: str, shape: str, repeat: int, step: int = 0) -> str:
    """Return an instruction; each step has separate registers and columns."""
    count, columns = (each * repeat for each in SHAPES[shape])
    name, place = f"sync.aligned.{shape}.x{repeat}.b32", f"[%r_lanes+{columns * step}]"
    if what == LOAD:
        values = ", ".join(f"%r_v{count * step + k}" for k in range(count))
        return f"tcgen05.ld.{name} {{{values}}}, {place};"
    return f"tcgen05.st.{name} {place}, {{{', '.join(f'%r_v{k}' for k in range(count))}}};"


def _ones(count: int) -> str:
    """Fill `count` registers with 1, loaded from memory so that the compiler does not
    rematerialise them. The buffer holds zeros, or ones from an earlier launch."""
    return "\n".join(f"ld.volatile.global.b32 %r_v{k}, [%d_mem+{4 * k}];\n"
                     f"or.b32 %r_v{k}, %r_v{k}, {ONE};" for k in range(count))  # fmt: skip


def _kernel(what: str, shape: str, repeat: int, body: str, warps: int, steps: int) -> Kernel:
    """Columns are zero before. What a load has read last has to be computed; what stores have left
    is looked at."""
    count, columns = (each * repeat * steps for each in SHAPES[shape])
    columns, groups = max(columns, 32), max(warps // 4, 1)
    sink = tuple(f"%r_v{k}" for k in range(count)) if what == LOAD else ()
    own = OWN_LANES + APART.format(columns=columns)
    before = own if what == LOAD else f"{own}\n{_ones(SHAPES[shape][0] * repeat)}"
    role = Role(body, before=before, sink=sink)
    return Kernel(
        (role,), block=WARP * warps, smem=1024, tmem=groups * columns,
        filled=f"{own}\n{columns_of(0, 0, columns)}\n{WRITTEN}", after=looked_at(0),
        answer=float(what == STORE), answered=WARP if shape == "32x32b" else 16,
    )  # fmt: skip


def rates() -> Iterator[Benchmark]:
    """Cycles between instructions of each warp, whose wait ends the round; four warps are one on
    each scheduler, eight are two."""
    for what in (LOAD, STORE):
        for shape, repeats in REPEATS.items():
            for repeat in repeats:
                for warps in (1, 4, 8):
                    yield _rate(what, shape, repeat, warps)


def _rate(what: str, shape: str, repeat: int, warps: int) -> Benchmark:
    fewer, points = min(max(BUDGET // (SHAPES[shape][0] * repeat), 1), MOST), []
    for steps in (fewer, 2 * fewer):
        lines = [access(what, shape, repeat, step) for step in range(steps)]
        made = _kernel(what, shape, repeat, "\n".join([*lines, WAIT[what]]), warps, steps)
        points.append(Point(made, COUNT, COUNT * steps))
    variant = {"shape": shape, "repeat": repeat, "warps": warps}
    return Benchmark("tmem", f"tmem_{what}", variant, CYCLES, tuple(points), arch=BLACKWELL)


def latencies() -> Iterator[Benchmark]:
    """Time accesses of one warp, each with its wait, one after the other."""
    for what in (LOAD, STORE):
        for shape, repeats in REPEATS.items():
            for repeat in repeats:
                points = []
                for steps in (4, 8):
                    body = "\n".join([access(what, shape, repeat), WAIT[what]] * steps)
                    made = _kernel(what, shape, repeat, body, 1, 1)
                    points.append(Point(made, COUNT, COUNT * steps))
                yield Benchmark("tmem", f"tmem_{what}_wait", {"shape": shape, "repeat": repeat},
                                CYCLES, tuple(points), arch=BLACKWELL)  # fmt: skip


def allocations() -> Iterator[Benchmark]:
    """32 columns that a warp gets, reads the address of, and gives back."""
    lines = """\
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r_slot], 32;
ld.volatile.shared.b32 %r_got, [%r_slot];
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r_got, 32;
"""
    points = []
    for steps in (4, 8):
        role = Role(lines * steps, before=f"add.u32 %r_slot, %r_smem, {SLOT};")
        points.append(Point(Kernel((role,), smem=1024), COUNT, COUNT * steps))
    variant = {"form": "alloc and dealloc", "columns": 32}
    yield Benchmark("tmem", "tensor_allocation", variant, CYCLES, tuple(points), arch=BLACKWELL)


def benchmarks() -> Iterator[Benchmark]:
    yield from rates()
    yield from latencies()
    yield from allocations()
