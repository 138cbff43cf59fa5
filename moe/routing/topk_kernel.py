"""The router: scores of all experts, the k best of them, shared ones, and weights (device code).

A warp routes one token (`choice.py`).
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32

from kernelkit.device.dependent import follow
from kernelkit.device.fake import fake_tensor
from kernelkit.plan.hw import WARP_THREADS
from moe.routing.choice import TYPES, Choice, Outputs, candidates_of, fake_outputs, order_of
from moe.routing.config import ROUTE_WARPS, VECTOR_BYTES, RouteConfig


class Route:
    """Host function and kernel of one RouteConfig."""

    def __init__(self, config: RouteConfig) -> None:
        self.config = config
        self.choice = Choice(config)

    @cute.jit
    def __call__(
        self,
        logits: cute.Tensor,
        bias: cute.Tensor | None,
        logit_bias: cute.Tensor | None,
        outputs: tuple[cute.Tensor, ...],
        scales: tuple[Float32, Float32 | None],
        order: tuple[cute.Tensor | Int32 | None, ...] | None,
        cleared: cute.Tensor | None,
        stream: CUstream,
    ) -> None:
        """Launch the kernel.

        Args:
            logits: (T, E).
            bias, logit_bias: (E,) fp32, or None.
            outputs: ids int32 and weights fp32, (T * slots,).
            scales: of the weights, and the weight of shared experts, None without any.
            order: fields of `Order`; None for more than one token.
            cleared: int32, which become zeros, or None.
        """
        tokens, _ = logits.shape
        written = Outputs(*outputs, *scales, order_of(order), cleared)
        self.kernel(logits, bias, logit_bias, written).launch(
            grid=((tokens + ROUTE_WARPS - 1) // ROUTE_WARPS, 1, 1),
            block=(ROUTE_WARPS * WARP_THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        logits: cute.Tensor,
        bias: cute.Tensor | None,
        logit_bias: cute.Tensor | None,
        outputs: Outputs,
    ) -> None:
        """Grid (tokens by ROUTE_WARPS,); see `__call__`."""
        follow()
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        lane, warp = thread % WARP_THREADS, thread // WARP_THREADS
        token = block * ROUTE_WARPS + warp
        found = candidates_of(warp, ROUTE_WARPS)
        tokens, _ = logits.shape
        if token < tokens:
            scores = self.choice.read(logits[token, None], lane)
            if cutlass.const_expr(logit_bias is not None):
                scores.store(scores.load() + self.choice.read(logit_bias, lane).load())
            biases = self.choice.read_if_any(bias, lane)
            self.choice.choose_experts(scores, biases, token, lane, found, outputs)


def host_function(config: RouteConfig, _arch: str) -> tuple:
    """Return the host function to compile for `config`, and example arguments."""
    dtype, align = TYPES[config.dtype], VECTOR_BYTES if config.vectors else None
    logits = fake_tensor(dtype, cute.sym_int32(), config.experts, align=align)
    bias, logit_bias = (
        fake_tensor(Float32, config.experts, align=align) if given else None
        for given in (config.bias, config.logit_bias)
    )
    return Route(config), logits, bias, logit_bias, *fake_outputs(config), CUstream(0)
