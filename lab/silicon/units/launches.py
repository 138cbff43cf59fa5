"""Groups 10 and 11: launches, the replacement of a CTA by the next, and the clock under load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lab.silicon.units.benchmark import CYCLES, Benchmark, Point
from lab.silicon.units.issue import FMA, wgmma_kernel
from lab.silicon.units.memory import stream
from lab.silicon.units.ptx import BLACKWELL, HOPPER, Kernel, Role, head
from lab.silicon.units.sync import initialise, wait
from lab.silicon.units.tcgen05 import Shape, rate_kernel

if TYPE_CHECKING:
    from lab.silicon.units.launch import Gpu

MICROSECONDS = "microseconds"
LAUNCHES = 1000
MOVED = 512 << 20
TOUCHED = 4 << 20  # bytes, of which a half is read and a half is written
LARGE = 200 * 1024  # bytes of shared memory that leave no room for a second CTA
KERNEL = """\
.visible .entry bench(.param .u64 buffer{more})
{{
.reg .b32 %r<9>;
.reg .f32 %f<9>;
.reg .b64 %a<4>;
.reg .pred %p<2>;
{body}
ret;
}}
"""
MORE = ", .param .align 64 .b32 words[{}]"
NOTHING = "griddepcontrol.launch_dependents;\ngriddepcontrol.wait;"
OF_A_THREAD = """\
ld.param.b64 %a0, [buffer];
mov.u32 %r0, %tid.x;
mov.u32 %r1, %ctaid.x;
mov.u32 %r2, %ntid.x;
mad.lo.u32 %r0, %r1, %r2, %r0;
mad.wide.u32 %a1, %r0, 4, %a0;
"""
STORE = "st.global.b32 [%a1], %r0;"
LOAD = "ld.global.b32 %r0, [%a1];\n"
FMAS = "".join(f"fma.rn.f32 %f{k}, %f{k}, %f{k}, %f{k};\n" for k in range(8))


@dataclass(frozen=True)
class Timed:
    """Launches of a kernel that does hardly anything, timed by events, in microseconds each.

    body: its PTX.
    nbytes: bytes of its buffer, at least one word per thread.
    words: additional words of parameters.
    flush: bytes filled before each launch, not timed: the figure is the time beyond that of an
    empty kernel.
    ctas: CTAs of the grid; 0 for one per SM, a negative number for that many per SM.
    how: "stream", "graph", or "overlapped" (a graph whose launches need not wait for the one
    before).
    """

    group: str
    name: str
    variant: dict[str, Any]
    how: str
    ctas: int
    block: int = 128
    cluster: int = 1
    smem: int = 0
    unit: str = MICROSECONDS
    body: str = NOTHING
    nbytes: int = 0
    words: int = 0
    launches: int = LAUNCHES
    flush: int = 0
    arch: str = ""

    def measure(self, gpu: Gpu, repeats: int) -> dict[str, Any]:
        """Measure and return the row."""
        declared = MORE.format(self.words) if self.words else ""
        text = head(gpu.arch) + KERNEL.format(body=self.body, more=declared)
        module, kernel = gpu.load(text, self.smem, self.cluster)
        grid = self.ctas if self.ctas > 0 else gpu.sms * max(-self.ctas, 1)
        grid = grid // self.cluster * self.cluster
        buffer = gpu.allocate(max(self.nbytes, 4 * grid * self.block))
        params = [buffer.to_bytes(8, "little")]
        params += [bytes(4 * self.words)] * bool(self.words)
        other = gpu.allocate(self.flush) if self.flush else 0
        nothing, ends = gpu.load(head(gpu.arch) + KERNEL.format(body="", more=""), 0, 1)

        def work(kernel: object = kernel, params: list[bytes] = params) -> None:
            for _ in range(self.launches):
                if self.flush:
                    gpu.fill(other, self.flush)
                gpu.launch(kernel, grid, self.block, params, smem=self.smem, cluster=self.cluster,
                           overlapped=self.how == "overlapped")  # fmt: skip

        def timed(work: Callable[[], None]) -> list[float]:
            replay = work if self.how == "stream" else gpu.graph(work)
            gpu.seconds(replay)
            return [gpu.seconds(replay) / self.launches * 1e6 for _ in range(repeats)]

        values = timed(work)
        if self.flush:
            least = float(np.median(timed(lambda: work(ends, params[:1]))))
            values = [value - least for value in values]
            gpu.free(other)
        for loaded in (module, nothing):
            gpu.unload(loaded)
        gpu.free(buffer)
        return {
            "kind": "unit", "group": self.group, "benchmark": self.name, "variant": self.variant,
            "value": round(float(np.median(values)), 4), "low": round(min(values), 4),
            "high": round(max(values), 4), "unit": self.unit, "n": len(values), "grid": grid,
        }  # fmt: skip


def launches() -> Iterator[Timed]:
    """Metrics of kernels that end at once, of so many CTAs; of several for each SM, one at a
    time."""
    for how in ("stream", "graph", "overlapped"):
        for ctas in (1, 132, 1320):
            variant = {"how": how, "ctas": ctas, "block": 128}
            body = NOTHING if how == "overlapped" else ""
            yield Timed("launch", "launch", variant, how, ctas, body=body)
    for block in (32, 128, 256, 512, 1024):
        for ctas in (1, 4, 32, 132, 264, 528, 1056, 2112, 4224, 8448):
            variant = {"how": "graph", "ctas": ctas, "block": block}
            how = {"body": "", "launches": 128}
            yield Timed("launch", "launch_exit", variant, "graph", ctas, block, **how)
    for cluster in (2, 4, 8):
        variant = {"how": "graph", "ctas": 128, "block": 128, "cluster": cluster}
        yield Timed("launch", "launch", variant, "graph", 128, cluster=cluster)
    for block in (128, 384):
        for waves in (1, 2, 4, 8):
            variant = {"how": "graph", "ctas_per_sm": waves, "block": block, "smem": LARGE}
            yield Timed("launch", "launch_waves", variant, "graph", -waves, block, smem=LARGE)


def touches() -> Iterator[Timed]:
    """A load, a store, or both, of 16 bytes of each thread: that L2 has, or behind something that
    has filled it; then beyond a launch that ends at once."""
    at = OF_A_THREAD.replace("%r0, 4, %a0", "%r0, 16, %a0")
    load, store = "ld.global.b32 %r0, [%a1];\n", "st.global.v4.b32 [%a1], {%r0, %r0, %r0, %r0};\n"
    unused = "setp.eq.u32 %p0, %r0, 12345;\n@%p0 st.global.b32 [%a1], %r0;"
    bodies = {"nothing": unused, "load": load + unused, "store": store, "load and store":
              load + store.replace("[%a1]", f"[%a1 + {TOUCHED // 2}]")}  # fmt: skip
    for what, body in bodies.items():
        for ctas in (1, 132):
            for block in (128, 512):
                for memory, flush in (("warm", 0), ("cold", 160 << 20)):
                    variant = {"how": "graph", "what": what, "ctas": ctas, "block": block}
                    how = {"body": at + body, "flush": flush, "launches": 32 if flush else 128}
                    yield Timed("launch", "touch", {**variant, "memory": memory}, "graph", ctas,
                                block, nbytes=2 * TOUCHED, **how)  # fmt: skip


def _spin(cycles: int) -> str:
    """Spin for `cycles` cycles of the SM's clock."""
    begin = "mov.u32 %r4, %clock;\nMORE:\nmov.u32 %r5, %clock;\nsub.u32 %r5, %r5, %r4;\n"
    return begin + f"setp.lt.u32 %p0, %r5, {cycles};\n@%p0 bra MORE;\n"


def dependent_costs() -> Iterator[Timed]:
    """Launches of which each waits for the one before it, with work before the next may begin,
    between that and the wait, or behind the wait; in SMs that have room for two CTAs, or for one.
    """
    begin, wait = NOTHING.splitlines(keepends=True)
    for cycles in (500, 2000, 4000):
        work = _spin(cycles)
        bodies = {"before": work + NOTHING, "between": f"{begin}{work}{wait}",
                  "behind": NOTHING + "\n" + work, "alone": f"{wait}\n{work}{begin}"}  # fmt: skip
        for where, body in bodies.items():
            for smem in (0, LARGE):
                variant = {"how": "overlapped", "work": where, "cycles": cycles, "smem": smem}
                yield Timed("launch", "launch_dependent", variant, "overlapped", 132, smem=smem,
                            body=body)  # fmt: skip


def _computed(instructions: str) -> str:
    """Eight numbers of a thread, what is made of them, and their sum to its word."""
    begin = "".join(f"add.u32 %r3, %r0, {k};\ncvt.rn.f32.u32 %f{k}, %r3;\n" for k in range(8))
    end = "".join(f"add.f32 %f0, %f0, %f{k};\n" for k in range(1, 8))
    return f"{OF_A_THREAD}{begin}{instructions}{end}cvt.rzi.u32.f32 %r0, %f0;\n{STORE}"


def _jumps(count: int, over: int) -> str:
    """Return `count` jumps, each over `over` instructions, with eight in between."""
    test = "setp.ne.u64 %p0, %a0, 0;\n"
    return test + "".join(
        f"{FMAS}@%p0 bra NEXT{k};\n{FMAS * (over // 8)}NEXT{k}:\n" for k in range(count)
    )


def first_costs() -> Iterator[Timed]:
    """Yield the costs that a kernel pays once per launch: parameters, first load, stores, and
    code of which no instruction repeats."""
    bodies = {
        "store": OF_A_THREAD + STORE,
        "load and store": OF_A_THREAD + LOAD + STORE,
        **{
            f"{count} instructions": _computed(FMAS * (count // 8))
            for count in (64, 512, 1024, 2048, 4096, 8192)
        },
        **{
            f"{count} jumps over {over}": _computed(_jumps(count, over))
            for count, over in ((4, 56), (8, 56), (16, 56), (32, 56), (8, 248), (16, 248), (32, 24))
        },
    }
    for what, body in bodies.items():
        for block in (32, 512):
            variant = {"how": "graph", "ctas": 132, "block": block, "body": what}
            yield Timed("launch", "launch_body", variant, "graph", 132, block, body=body)


def shape_costs() -> Iterator[Timed]:
    """A kernel that stores a word of each thread, with more shared memory, threads and clusters."""
    for block, smem, cluster in (
        *((256, 0, 1), (256, 48 << 10, 1), (256, 100 << 10, 1), (256, 200 << 10, 1)),
        *((1024, 0, 1), (256, 0, 2), (256, 0, 8), (256, 100 << 10, 8), (32, 100 << 10, 8)),
    ):
        body = OF_A_THREAD + LOAD + STORE
        variant = {"how": "graph", "ctas": 64, "block": block, "smem": smem, "cluster": cluster}
        how = {"body": body, "smem": smem, "cluster": cluster}
        yield Timed("launch", "launch_shape", variant, "graph", 64, block, **how)


def parameter_costs() -> Iterator[Timed]:
    """Words of parameters, which every launch has at a place of its own, one after the other."""
    for words, apart in (
        *((2, 64), (4, 64), (8, 64), (16, 64), (32, 64), (48, 64)),
        *((16, 4), (16, 16), (16, 32), (8, 128), (16, 128), (8, 256)),
    ):
        body = OF_A_THREAD + "".join(
            f"ld.param.b32 %r3, [words + {k * apart}];\nxor.b32 %r0, %r0, %r3;\n"
            for k in range(words)
        )
        variant = {"how": "graph", "ctas": 132, "block": 32, "words": words, "apart": apart}
        how = {"body": body + STORE, "words": 800}
        yield Timed("launch", "launch_parameters", variant, "graph", 132, 32, **how)
    how = {"body": OF_A_THREAD + STORE, "words": 800}
    variant = {"how": "graph", "ctas": 132, "block": 32, "words": 0, "apart": 0}
    yield Timed("launch", "launch_parameters", variant, "graph", 132, 32, **how)


def memory_rates() -> Iterator[Timed]:
    """Kernels that read, write or copy much more than L2 has, or a piece of 8 MiB over and over:
    TB/s follow from the bytes."""
    for what, accesses in {
        "read": "ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%a1];\nxor.b32 %r3, %r3, %r4;\n",
        "write": "st.global.v4.b32 [%a1], {%r0, %r0, %r0, %r0};\n",
        "copy": "ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%a1];\n"
        f"st.global.v4.b32 [%a1 + {MOVED}], {{%r4, %r5, %r6, %r7}};\n",
    }.items():
        step = 264 * 1024 * 16
        body = OF_A_THREAD.replace("%r0, 4, %a0", "%r0, 16, %a0") + "mov.b32 %r3, 0;\n"
        end = "setp.eq.u32 %p0, %r3, 12345;\n@%p0 st.global.b32 [%a0], %r3;"
        rounds = MOVED // step
        cold = body + (accesses + f"add.u64 %a1, %a1, {step};\n") * rounds + end
        back = f"add.u64 %a1, %a1, {step};\n{accesses}sub.u64 %a1, %a1, {step};\n"
        warm = body + (accesses + back) * (rounds // 2) + end
        warm = warm.replace(".global.v4", ".relaxed.gpu.global.v4")  # each of them is done
        for where, text in (("HBM", cold), ("L2", warm)):
            variant = {"how": "graph", "what": what, "nbytes": rounds * step, "from": where}
            how = {"nbytes": 2 * MOVED + step, "launches": 20, "body": text}
            yield Timed("launch", "memory_rate", variant, "graph", 264, 1024, **how)


def replacements() -> Iterator[Benchmark]:
    """Time from a CTA's last clock to the first clock of the next CTA on the same SM."""
    for block in (128, 384):
        for smem in (1024, LARGE):
            for cluster in (1, 2):
                role = Role("bar.warp.sync -1;\n" * 64)
                made = Kernel((role,), block=block, grid=8 if smem == LARGE else 4, smem=smem,
                              cluster=cluster, per_sm=True)  # fmt: skip
                if smem != LARGE:  # several fit: the figure would say nothing
                    continue
                variant = {"block": block, "smem": smem, "cluster": cluster}
                points = (Point(made, 64, 1),)
                yield Benchmark("launch", "cta_start", variant, CYCLES, points, take="replacement")


FENCE = "fence.mbarrier_init.release.cluster;"
CANCEL = """\
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r_smem], 16;
add.u32 %r_to, %r_smem, 16;
clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r_to],\
 [%r_smem];
"""


def cancels() -> Iterator[Benchmark]:
    """Time from the request for a CTA that has not begun to the end of the wait for the answer,
    that none is left. The request is made once, since it must not be repeated."""
    role = Role(CANCEL + wait(0, "A"), single=True)
    points = (Point(Kernel((role,), f"{initialise([1])}\n{FENCE}", smem=1024), 1, 1),)
    yield Benchmark("launch", "cancel", {"form": "try_cancel"}, CYCLES, points, arch=BLACKWELL)


LOADS = {
    "fma of one warp": (lambda: Kernel((Role(FMA * 64, before="mov.b32 %r100, %r_y;",
                                             sink=("%r100",)),)), 40000),
    "fma of all SMs": (lambda: Kernel((Role(FMA * 64, before="mov.b32 %r100, %r_y;",
                                            sink=("%r100",)),), block=512, per_sm=True), 20000),
    "wgmma of zeros, all SMs": (lambda: _everywhere(
        wgmma_kernel(256, registers=False, steps=8, groups=2)), 4000),
    "tcgen05 of zeros, all SMs": (lambda: rate_kernel(Shape(n=256), 16, zeros=True, per_sm=True),
                                  4000),
    "loads from L2, all SMs": (lambda: stream("ld.global.v4", 32, 4, cold=False, per_sm=True),
                               10000),
    "loads from HBM, all SMs": (lambda: stream("ld.global.v4", 32, 4, cold=True, per_sm=True),
                                10000),
}  # fmt: skip


def _everywhere(kernel: Kernel) -> Kernel:
    return Kernel(kernel.roles, kernel.setup, kernel.block, smem=kernel.smem, per_sm=True)


ARCHS = {"wgmma": HOPPER, "tcgen05": BLACKWELL}  # of loads that not every GPU has


def clocks() -> Iterator[Benchmark]:
    """Cycles of the SM per nanosecond of the global timer, over some milliseconds."""
    for name, (make, count) in LOADS.items():
        points, arch = (Point(make(), count, 1),), ARCHS.get(name.split()[0], "")
        how = {"take": "gigahertz", "arch": arch}
        yield Benchmark("clock", "clock", {"load": name}, "GHz", points, **how)


def benchmarks() -> Iterator[Benchmark | Timed]:
    yield from launches()
    yield from dependent_costs()
    yield from touches()
    yield from first_costs()
    yield from shape_costs()
    yield from parameter_costs()
    yield from memory_rates()
    yield from replacements()
    yield from cancels()
    yield from clocks()
