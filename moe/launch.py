"""The operator `blackwell_kernels::moe_grouped_gemm`: check, allocate, describe the launch.

Nothing here waits for the device or reads from it, so that a CUDA graph can capture it.
"""

from __future__ import annotations

import torch

from kernelkit.call.launch import choose_target, launch, sms_of
from kernelkit.call.operator import Operator
from kernelkit.call.tensors import DTYPES, with_plain_strides
from kernelkit.compile.arch import written_for
from kernelkit.compile.compiler import compile_once
from kernelkit.compile.kernel import CompiledKernel
from moe.arguments import Activation, Arguments, SwiGLU
from moe.choose import work_of
from moe.config import KERNELS, WINDOW, WINDOW_STEP, GroupedConfig
from moe.formats import (
    FORMATS,
    SCALE_ATOM_BYTES,
    row_blocks,
    scale_atoms_of,
    scale_blocks,
    scale_bytes,
)
from moe.kernel_arguments import GroupedArguments, Moved, Numbers, Tensors
from moe.quantized import Quantized, of_bytes

ARCHS = tuple(KERNELS)
ON_HOPPER = "; on Hopper, pass moe.arrange(experts) to fused_moe"

Results = tuple[torch.Tensor, torch.Tensor]


def forward(arguments: Arguments) -> Results:
    """Launch once. Return (elements or numbers, scale factors), as of `empty_results`."""
    arguments.check()
    device, problem = arguments.offsets.device, arguments.problem
    results = empty_results(arguments)
    given = kernel_arguments(arguments, results) if problem.rows and problem.columns else None
    target = choose_target(device, arguments.backend, arguments.arch, ARCHS, ON_HOPPER)
    if given is not None:
        launch(compile_for(arguments.config, target.arch), (given,), target, device)
    return results


def empty_results(arguments: Arguments) -> Results:
    """Allocate [R, columns] in the dtype of the output, and nothing else; or, for a quantised
    output, bytes of elements and of scale factors. Sizes may be symbols."""
    like, rows, columns = arguments.x.data, arguments.x.data.shape[0], arguments.columns
    form = FORMATS.get(arguments.out)
    if form is None:
        values = like.new_empty((rows, columns), dtype=DTYPES[arguments.out])
        return values, like.new_empty(0, dtype=torch.uint8)
    data = like.new_empty((rows, columns // form.per_byte), dtype=torch.uint8)
    room = scale_bytes(arguments.blocks, form.columns(columns))
    return data, like.new_empty(room, dtype=torch.uint8)


def quantised_result(
    out: str, encode_scale: torch.Tensor | None, data: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor | Quantized:
    """Return the results of the operator as data or, for a format, as Quantized."""
    if out not in FORMATS:
        return data
    return of_bytes(data, scales, out, encode_scale)


def compile_for(config: GroupedConfig, arch: str) -> CompiledKernel | None:
    """`GroupedGemm.__call__`, found or compiled, once per process."""
    return compile_once(config, arch, KERNELS[written_for(arch)])


def kernel_arguments(arguments: Arguments, results: Results) -> GroupedArguments:
    """Return the launch arguments of `moe.sm100.kernel.GroupedGemm`."""
    x, w, problem, (data, scales) = arguments.x, arguments.w, arguments.problem, results
    blocks, atoms = scale_blocks(problem.rows, problem.experts), scale_atoms_of(x.fmt, problem.k)
    w_blocks = row_blocks(problem.columns)
    w_scale = w.decode_scale
    w_atoms = scale_atoms_of(w.fmt, problem.k)
    if w_scale is not None and w_scale.ndim == 2:
        w_scale = with_plain_strides(w_scale)
    w_lines = _windows(w.data) if arguments.config.x_fmt else _lines(w.data)
    w_scales = _atoms(w.scales, (problem.experts, w_blocks, w_atoms))
    return GroupedArguments(
        operands=Moved(
            x=with_plain_strides(_lines(x.data.unsqueeze(0))),
            w=with_plain_strides(w_lines),
            x_scales=with_plain_strides(_atoms(x.scales, (1, blocks, atoms))),
            w_scales=with_plain_strides(w_scales),
        ),
        tensors=Tensors(
            offsets=arguments.offsets,
            out=data,
            x_scale=x.decode_scale,
            w_scale=w_scale,
            out_scales=scales if arguments.out in FORMATS else None,
            encode_scale=arguments.encode_scale,
            amax=arguments.amax,
            bias=plain(arguments.bias),
        ),
        numbers=numbers_of(arguments.activation or Activation(0)),
        k=problem.k,
        ctas=grid(arguments),
    )


def plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the tensor as kernels are compiled for, or None."""
    return None if tensor is None else with_plain_strides(tensor)


def numbers_of(form: Activation | SwiGLU) -> Numbers:
    """Return the coefficients of an activation. A limit of 0 means none."""
    return Numbers(alpha=float(form.alpha), beta=float(form.beta), limit=float(form.limit or 0.0))


def grid(arguments: Arguments) -> int:
    """Return the number of CTAs: one on every SM, or those of the upper bound of tiles."""
    tiles, ctas = work_of(arguments.problem, arguments.config)
    at_once = max(1, sms_of(arguments.offsets.device) // ctas)
    return ctas * min(tiles, at_once)


def _lines(data: torch.Tensor) -> torch.Tensor:
    """uint8 [experts, rows, 1, bytes of K]."""
    return data.view(torch.uint8).unsqueeze(2)


def _windows(data: torch.Tensor) -> torch.Tensor:
    """uint8 [experts, rows, windows, bytes of one]: they overlap, as `moe.config` says."""
    return data.view(torch.uint8).unfold(-1, WINDOW // 2, WINDOW_STEP // 2)


def _atoms(scales: torch.Tensor, sizes: tuple[int, int, int]) -> torch.Tensor:
    """uint16 [experts, atoms along K, blocks of 128 rows, words of an atom]. sizes: experts,
    blocks, atoms."""
    words = scales.view(torch.uint8).view(torch.uint16)
    return words.view(*sizes, SCALE_ATOM_BYTES // 2).transpose(1, 2)


GROUPED_GEMM = Operator(
    "moe_grouped_gemm", Arguments, forward, empty_results, results=2, writes=("amax",)
)
