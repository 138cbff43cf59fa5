"""`warmup`: every kernel that a matrix can need, compiled ahead of calls."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from kernelkit.call.launch import choose_target, sms_of
from kernelkit.call.tensors import DTYPE_NAMES, DTYPES, require_dtypes, require_type
from kernelkit.compile.compiler import collecting
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.warm import Progress, Warmed, counts, kernels_over, warm
from kernelkit.tune.choices import standing_for
from q8_0.choose import many_tokens, measured, product_config
from q8_0.config import (
    INTEGERS,
    MOST_TOKENS,
    NUMBERS,
    BatchConfig,
    DequantiseConfig,
    MatvecConfig,
    QuantiseConfig,
    RepackConfig,
)
from q8_0.launch import ARCHS, Config, compile_kernel
from q8_0.numbers.launch import candidates_for as numbers_for
from q8_0.numbers.launch import compile_kernel as compile_numbers
from q8_0.product.choose import TUNED
from q8_0.product.launch import candidates_for, config_for
from q8_0.product.launch import compile_kernel as compile_product
from q8_0.weights import Weights


def warmup(
    weights: Weights,
    *,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    tokens: Sequence[int] = range(1, MOST_TOKENS + 1),
    biases: bool = False,
    backend: str = "auto",
    arch: str | None = None,
    progress: Progress | bool | None = None,
) -> Warmed:
    """Find or compile the kernels of `repack` (of rows in one piece, aligned), `dequantise`,
    `quantise`, `matvec`, and with more tokens than it takes of the products behind `Q8Linear`, for
    weights like these, whatever their contents.

    Args:
        weights: may be on the device 'meta' where `arch` is given.
        dtypes: of x, and of the results beside float32.
        tokens: how many a call may have, a sequence such as `range(1, 8193)`.
        biases: whether calls have a bias, too.
        progress: see `kernelkit.compile.warm.warm`.
    """
    if not isinstance(weights, Weights):
        raise TypeError(f"weights is {type(weights).__name__}, expected q8_0.Weights")
    require_dtypes(dtypes, DTYPE_NAMES)
    require_type("biases", biases, bool)
    sizes = counts("tokens", tokens)
    target = choose_target(weights.data.device, backend, arch, ARCHS)
    names = [DTYPE_NAMES[dtype] for dtype in dtypes]
    sms = sms_of(weights.data.device)
    return warm(kernels_for(weights, names, sizes, biases, (target.arch, sms)), progress)


def kernels_for(
    weights: Weights,
    dtypes: Sequence[str],
    tokens: Sequence[int],
    biases: bool,
    place: tuple[str, int],
) -> list[KernelKey]:
    """The kernels of `warmup`, each once; dtypes by name; place: architecture, SMs."""
    arch, sms = place
    outs = [*dict.fromkeys((*dtypes, "fp32"))]
    pairs = [(name, name) for name in dtypes] + [(INTEGERS, out) for out in outs]
    products: list[MatvecConfig | BatchConfig] = []
    for dtype, out in pairs:
        for count in (count for count in tokens if count <= MOST_TOKENS):
            size = count, weights.rows, weights.cols
            plain = product_config(weights.layout, dtype, out, sizes=size, bias=False, sms=sms)
            both = (plain, replace(plain, bias=True)) if biases else (plain,)
            products += [measured(each, size, weights.data.device) for each in both]
    configs: list[Config] = [RepackConfig(to_soa) for to_soa in (True, False)]
    configs += [DequantiseConfig(weights.layout, name) for name in dtypes]
    configs += [QuantiseConfig(name) for name in dtypes]
    with collecting() as keys:
        for config in (*configs, *dict.fromkeys(products)):
            compile_kernel(config, arch)

    def products_at(count: int) -> list[KernelKey]:
        with collecting() as found, standing_for(weights.data.device):
            for out, bias in itertools.product(outs, {False, biases}):
                shape = count, weights.rows
                result = torch.empty(shape, dtype=DTYPES[out], device="meta")
                # Which candidate is the fastest changes with every few tiles; which there are, with
                # thresholds.
                of_rules = candidates_for(weights, result, arch, bias=bias)
                for config in (*of_rules.values(), config_for(weights, result, arch, bias=bias)):
                    compile_product(config, arch)
                if out in dtypes and many_tokens(NUMBERS, out, arch) == NUMBERS:
                    for each in numbers_for(weights, result, bias=bias):
                        compile_numbers(each, arch)
        return found

    many = [count for count in tokens if count > MOST_TOKENS]
    problems = TUNED.measured(weights.data.device)
    tuned = {problem["sizes"]["tokens"] for problem, _ in problems}
    each = [key for count in tuned.intersection(many) for key in products_at(count)]
    return list(dict.fromkeys([*keys, *each, *kernels_over(many, products_at)]))
