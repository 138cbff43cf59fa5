"""Both products of experts with four-bit weights and the weighted sum, in one launch (device code).

The grid has at most one CTA for each SM, and all CTAs run at the same time: between the products
each waits for all others. Reading order: plan.py, items.py, load.py, math.py, finish.py.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint8
from cutlass.memory import SmemAllocator

from kernelkit.device.barriers import arrive, meet
from kernelkit.device.buffers import buffer_at
from kernelkit.plan import hw
from moe.kernel_arguments import FewKernelArguments, FewSizes, FewTensors, Numbers
from moe.mixed.few.args import Buffers, Scope, example_arguments
from moe.mixed.few.barriers import open_barriers
from moe.mixed.few.config import ITEM_ROWS, MOST_EXPERTS, MOST_ROWS, FewConfig
from moe.mixed.few.finish import Finish
from moe.mixed.few.items import clear, make_items, make_items_of_warp
from moe.mixed.few.load import Rows, Weights, request_tokens
from moe.mixed.few.math import Math
from moe.mixed.few.plan import make_plan


class FewRows:
    """Host function and kernel of one config."""

    def __init__(self, config: FewConfig) -> None:
        self.plan = make_plan(config)
        self.math, self.finish = Math(self.plan), Finish(self.plan)
        self.weights, self.rows = Weights(self.plan), Rows(self.plan)

    @cute.jit
    def __call__(self, given: FewKernelArguments, stream: CUstream) -> None:
        """Launch the kernel."""
        self.kernel(given.tensors, given.numbers, given.sizes).launch(
            grid=(given.ctas, 1, 1),
            block=(self.plan.roles.threads, 1, 1),
            stream=stream,
            use_pdl=True,
            cooperative=self.plan.config.cooperative,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, tensors: FewTensors, numbers: Numbers, sizes: FewSizes) -> None:
        """Grid (CTAs, 1, 1)."""
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        buffers = self.buffers()
        if warp == plan.roles["weights"].first_warp:
            open_barriers(plan, buffers.barriers)
        if cutlass.const_expr(not plan.config.by_warp):
            clear(plan, buffers, sizes)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        request_tokens(plan, tensors.x)
        items = self.items(warp, buffers, tensors, sizes)
        scope = Scope(tensors, numbers, sizes, buffers, items)
        if warp <= plan.roles["math"].last_warp:
            self.math.run(scope, warp)
        elif warp <= plan.roles["finish"].last_warp:
            self.finish.run(scope, warp - plan.config.warps)
        elif warp == plan.roles["weights"].first_warp:
            self.weights.run(scope)
        else:
            self.rows.run(scope)

    @cute.jit
    def items(self, warp: Int32, buffers: Buffers, tensors: FewTensors, sizes: FewSizes) -> Int32:
        """Return the number of items, whose tables are there."""
        plan, items = self.plan, Int32(0)
        if cutlass.const_expr(plan.config.by_warp):
            if warp == plan.roles["weights"].first_warp:
                items = make_items_of_warp(buffers, tensors.ids, sizes)
                arrive(plan.barriers, "items")
            else:
                meet(plan.barriers, "items")
                items = buffers.words[0]
        else:
            cute.arch.sync_threads()
            items = make_items(plan, buffers, tensors, sizes)
            cute.arch.sync_threads()
        return items

    def buffers(self) -> Buffers:
        """All buffers in shared memory."""
        plan = self.plan.smem
        smem = SmemAllocator().allocate(plan.bytes, byte_alignment=hw.SMEM_SWIZZLE_ALIGN)

        def table(name: str, size: int) -> cute.Tensor:
            return cute.make_tensor(buffer_at(plan, smem, name, Int32), cute.make_layout(size))

        return Buffers(
            ring=buffer_at(plan, smem, "ring", Uint8),
            rows=buffer_at(plan, smem, "rows", Uint8),
            sums=buffer_at(plan, smem, "sums", Uint8),
            barriers=buffer_at(plan, smem, "mbarriers", Int64),
            slots=table("slots", MOST_ROWS * ITEM_ROWS),
            items=table("items", MOST_ROWS),
            counts=table("counts", MOST_EXPERTS),
            words=table("words", 4),
        )


def host_function(config: FewConfig, _arch: str) -> tuple:
    """Return the host function to compile for `config`, and example arguments."""
    return FewRows(config), *example_arguments(config)
