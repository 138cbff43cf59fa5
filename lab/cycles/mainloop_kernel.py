"""The main loop of a GEMM in one CTA: a ring that TMA fills and tcgen05.mma empties (device code).

How many of its stages are used is an argument, so that one compiled kernel serves all counts.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import blackwell_helpers as sm100

from kernelkit.device import tmem
from kernelkit.device.boxes import TmaTensor
from kernelkit.device.buffers import buffer_at
from kernelkit.device.fake import fake_tensor
from kernelkit.device.pipelines import Event, consumer_state, make_pipelines, publish_barriers
from kernelkit.device.umma import accumulator, issue, shared
from kernelkit.plan import hw
from lab.cycles.mainloop_plan import MainloopConfig, MainloopPlan

ELEMENTS = {"bf16": cutlass.BFloat16, "e4m3": cutlass.Float8E4M3FN}
MOST_COLUMNS = 32  # of D that a thread has at a time


@dataclass(frozen=True)
class Place:
    """A stage, and the phase of its barriers."""

    index: Int32
    phase: Int32


@dataclass(frozen=True)
class Scope:
    """Resources of the roles.

    steps: steps of K.
    stages: stages of the ring that are used."""

    a: TmaTensor
    b: TmaTensor
    d: cute.Tensor
    steps: Int32
    stages: Int32
    sA: cute.Pointer
    sB: cute.Pointer
    tmem: cute.Pointer
    pipes: dict[str, Event]


def make_mma(config: MainloopConfig) -> cute.TiledMma:
    """Both operands with K contiguous, in shared memory."""
    element, major = ELEMENTS[config.dtype], OperandMajorMode.K
    return sm100.make_trivial_tiled_mma(
        element, element, major, major, Float32, tcgen05.CtaGroup.ONE, (config.m, config.n)
    )


def layouts(config: MainloopConfig) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
    """Layouts of all stages of A and of B, as wide a swizzle as a row has bytes."""
    mma, tile = make_mma(config), (config.m, config.n, config.k)
    element, stages = ELEMENTS[config.dtype], config.stages
    return (
        sm100.make_smem_layout_a(mma, tile, element, stages),
        sm100.make_smem_layout_b(mma, tile, element, stages),
    )


@cute.jit
def fetch(source: TmaTensor, tile: cutlass.Constexpr, held: cute.Tensor, step: Int32,
          place: Place, barrier: cute.Pointer) -> None:  # fmt: skip
    """Start the copies of a step of one operand: one box for each 128 bytes of its rows."""
    steps = cute.local_tile(source.tensor, tile, (0, None))  # -> (rows, k, steps)
    to_shared, from_global = cpasync.tma_partition(
        source.atom, 0, cute.make_layout(1), cute.group_modes(held, 0, 3),
        cute.group_modes(steps, 0, 2),
    )  # fmt: skip
    cute.copy(
        source.atom, from_global[None, step], to_shared[None, place.index], tma_bar_ptr=barrier
    )


class Load:
    """Fills the ring."""

    def __init__(self, config: MainloopConfig) -> None:
        self.config = config

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        config, ab = self.config, scope.pipes["ab"]
        a_layout, b_layout = layouts(config)
        a, b = shared(scope.sA, a_layout), shared(scope.sB, b_layout)
        index, phase = Int32(0), Int32(1)
        for step in cutlass.range(scope.steps, unroll=1):
            place = Place(index, phase)
            ab.acquire(place)
            barrier = ab.barrier(index)
            fetch(scope.a, (config.m, config.k), a, step, place, barrier)
            fetch(scope.b, (config.n, config.k), b, step, place, barrier)
            index += 1
            if index == scope.stages:
                index, phase = Int32(0), phase ^ 1


class Mma:
    """Empties the ring."""

    def __init__(self, config: MainloopConfig) -> None:
        self.config = config

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        config, ab = self.config, scope.pipes["ab"]
        mma, tile = make_mma(config), (config.m, config.n, config.k)
        a_layout, b_layout = layouts(config)
        a = mma.make_fragment_A(shared(scope.sA, a_layout))  # (MMA, MMA_M, MMA_K, stages)
        b = mma.make_fragment_B(shared(scope.sB, b_layout))
        d = accumulator(mma, tile, scope.tmem, Int32(0))
        index, phase = Int32(0), Int32(0)
        for step in cutlass.range(scope.steps, unroll=1):
            ab.wait(Place(index, phase))
            issue(mma, d, a[None, None, None, index], b[None, None, None, index], step > 0)
            ab.release(index)
            index += 1
            if index == scope.stages:
                index, phase = Int32(0), phase ^ 1
        scope.pipes["d"].signal(0)


class Epilogue:
    """Stores D."""

    def __init__(self, config: MainloopConfig) -> None:
        self.config = config

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        config = self.config
        tile = (config.m, config.n, config.k)
        part = (config.m, min(MOST_COLUMNS, config.n))
        thread, _, _ = cute.arch.thread_idx()
        # The base alone tells how it is aligned, which the loads ask for.
        d = accumulator(make_mma(config), tile, scope.tmem, Int32(0))
        d = cute.make_tensor(scope.tmem, d.layout)
        parts = cute.flat_divide(d[((None, None), 0, 0)], part)  # -> (rows, columns, 1, parts)
        atom = sm100.get_tmem_load_op(tile, LayoutEnum.ROW_MAJOR, Float32, Float32, part, False)
        copy = tcgen05.make_tmem_copy(atom, parts[(None, None, 0, 0)])
        mine = copy.get_slice(thread)
        tTR_tD = mine.partition_S(parts)
        tTR_gD = mine.partition_D(cute.flat_divide(scope.d, part))
        scope.pipes["d"].wait(consumer_state(1))
        tmem.order_after_wait()
        for number in cutlass.range_constexpr(config.n // part[1]):
            target = tTR_gD[(None, None, None, 0, number)]
            held = cute.make_rmem_tensor(target.shape, Float32)
            cute.copy(copy, tTR_tD[(None, None, None, 0, number)], held)
            tmem.wait_loads()
            cute.autovec_copy(held, target)


class Mainloop:
    """Product D = A B^T.

    a: [m, K].
    b: [n, K].
    d: [m, n] in fp32.
    K is a multiple of k."""

    def __init__(self, config: MainloopConfig) -> None:
        self.config, self.plan = config, MainloopPlan(config)

    @cute.jit
    def __call__(
        self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, stages: Int32, stream: CUstream
    ) -> None:
        """Describe the copies, and launch one CTA."""
        config = self.config
        fetches = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        mma, tile = make_mma(config), (config.m, config.n, config.k)
        a_layout, b_layout = (cute.select(layout, mode=[0, 1, 2]) for layout in layouts(config))
        copies = []
        for tensor, layout, make in (
            (a, a_layout, cute.nvgpu.make_tiled_tma_atom_A),
            (b, b_layout, cute.nvgpu.make_tiled_tma_atom_B),
        ):
            atom, coordinates = make(fetches, tensor, layout, tile, mma)
            copies.append(TmaTensor(atom, coordinates))
        self.kernel(*copies, d, cute.size(a, mode=[1]) // config.k, stages).launch(
            grid=(1, 1, 1), block=(self.plan.roles.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, a: TmaTensor, b: TmaTensor, d: cute.Tensor, steps: Int32, stages: Int32
    ) -> None:
        """192 threads: each warp plays its role."""
        plan, config = self.plan, self.config
        element = ELEMENTS[config.dtype]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(plan.smem.bytes, byte_alignment=hw.SMEM_SWIZZLE_ALIGN)
        pipes = make_pipelines(plan.edges, buffer_at(plan.smem, smem, "barriers", Int64))
        tmem_base = buffer_at(plan.smem, smem, "tmem_base", Int32)
        if warp == 0:
            cute.arch.alloc_tmem(plan.tmem.allocated, tmem_base)
            cute.arch.relinquish_tmem_alloc_permit()
        publish_barriers(plan.edges)
        sA, sB = (buffer_at(plan.smem, smem, name, element) for name in ("sA", "sB"))
        columns = cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_base)
        scope = Scope(a, b, d, steps, stages, sA, sB, columns, pipes)
        if warp == plan.roles["load"].first_warp:
            Load(config).run(scope)
        elif warp == plan.roles["mma"].first_warp:
            Mma(config).run(scope)
        else:
            Epilogue(config).run(scope)
        cute.arch.sync_threads()
        if warp == 0:
            cute.arch.dealloc_tmem(columns, plan.tmem.allocated)


def host_function(config: MainloopConfig, arch: str) -> tuple:
    """Return the arguments for `kernelkit.compile.compiler.compile_once`."""
    element, size = ELEMENTS[config.dtype], cute.sym_int32(divisibility=config.k)
    a, b = (fake_tensor(element, rows, size, align=16) for rows in (config.m, config.n))
    d = fake_tensor(Float32, config.m, config.n, align=16)
    return Mainloop(config), a, b, d, Int32(1), CUstream(0)
