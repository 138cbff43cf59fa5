"""Choose the config of a product: data alone, equal for both layouts, so that their bits are equal.

A GPU reads at full speed while each SM has about 32 KB in flight. A warp of the matrix-vector
kernel has rows x unrolled x 512 bytes in flight, so 8 warps of 4 rows are plenty. If the rows make
fewer warps than fit all SMs at once, `splits` warps share the columns of a row. `splits` doubles
while each warp keeps at least 512 columns. It stops there: warps that do not fit would run as a
second wave on some of the SMs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from kernelkit.compile.arch import PORTABLE, written_for
from kernelkit.plan import hw
from kernelkit.tune.choices import Choice, Tuned
from q8_0.blocks import BLOCK
from q8_0.config import (
    INTEGERS,
    MOST_TOKENS,
    NUMBERS,
    PIECE,
    RESIDENT_WARPS,
    VECTOR_BYTES,
    BatchConfig,
    MatvecConfig,
)
from q8_0.numbers.choose import ARCHS as NUMBER_ARCHS
from q8_0.numbers.config import DTYPES as NUMBER_DTYPES

if TYPE_CHECKING:
    import torch

MOST_ROWS, MOST_SPLITS = 4, 8
PASS = PIECE * hw.WARP_THREADS  # columns that a warp reads at a time
FEW_TOKENS = 2  # most tokens whose sums leave registers for two reads of four rows
UNROLLED = 8  # blocks that a warp has in flight if it multiplies on tensor cores


def matvec_config(
    layout: str, dtype: str, out: str, *, sizes: tuple[int, int, int], bias: bool, sms: int
) -> MatvecConfig:
    """Choose the config of a matrix-vector product.

    Args:
        layout: layout of the weights
        dtype: dtype of x
        out: dtype of the result
        sizes: tokens, rows, columns
        bias: whether a bias is added
        sms: number of SMs of the GPU

    Raises ValueError for more than MOST_TOKENS tokens.
    """
    tokens, rows, cols = sizes
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"{tokens} tokens: from 1 to {MOST_TOKENS} share a read of the weights")
    shared = 1 << (tokens - 1).bit_length()
    few = shared <= FEW_TOKENS
    half, of_warp, splits = RESIDENT_WARPS * sms // 2, MOST_ROWS if few else 2, 1
    while splits < MOST_SPLITS and rows * splits <= half * of_warp and cols >= 2 * splits * PASS:
        splits *= 2
    while of_warp > 1 and rows * splits <= half * of_warp:
        of_warp //= 2
    warps = max(splits, 4)
    return MatvecConfig(layout, dtype, out, shared, of_warp, splits, 2 if few else 1, warps, bias)


def batch_config(
    layout: str, dtype: str, out: str, *, sizes: tuple[int, int, int], bias: bool, sms: int
) -> BatchConfig:
    """Choose the config of a product on tensor cores, whose x has 16 bits or fewer."""
    tokens, rows, cols = sizes
    warps, splits = -(-rows // BatchConfig.rows), 1
    while splits < MOST_SPLITS and 2 * warps * splits <= RESIDENT_WARPS * sms:
        if cols < 2 * splits * BLOCK * UNROLLED:
            break
        splits *= 2
    shared = 8 if tokens <= 8 else 16
    # 16 tokens and their scales need registers; a thread has 128.
    unrolled = UNROLLED
    if shared == 16:
        unrolled = UNROLLED // 2 if dtype == INTEGERS else 6
    return BatchConfig(layout, dtype, out, shared, splits, unrolled, max(splits, 4), bias)


def product_config(
    layout: str, dtype: str, out: str, *, sizes: tuple[int, int, int], bias: bool, sms: int
) -> MatvecConfig | BatchConfig:
    """Tensor cores from two tokens on, but for x in fp32, whose bits they would not keep."""
    make = matvec_config if sizes[0] == 1 or dtype == "fp32" else batch_config
    return make(layout, dtype, out, sizes=sizes, bias=bias, sms=sms)


def many_tokens(activations: str, dtype: str, arch: str) -> str:
    """Return how `Q8Linear` multiplies more than MOST_TOKENS tokens: NUMBERS or INTEGERS.

    Args:
        activations: what the layer asks for; INTEGERS has its way
        dtype: dtype of x
        arch: architecture of the GPU, or of the emulator
    """
    possible = dtype in NUMBER_DTYPES and written_for(arch) in NUMBER_ARCHS
    return NUMBERS if activations == NUMBERS and possible else INTEGERS


def width_of(*numbers: int) -> int:
    """Bytes of the widest access, up to 16, that divides all of these addresses and strides."""
    width = VECTOR_BYTES
    while any(number % width for number in numbers):
        width //= 2
    return width


# ---- what may be measured

# Not the splits, nor `unrolled` as it depends on them: they determine the order of sums and so the
# bits, which must be the same for both layouts.
OPTIONS = ("rows", "unrolled", "warps")
MODULES = ("q8_0.matvec_kernel", "q8_0.batch_kernel")
TUNED = Tuned("q8_0.matvec", dict.fromkeys(("sm_100a", "sm_90a", PORTABLE), MODULES), OPTIONS)


@dataclass(frozen=True)
class Problem:
    """Key of a tuned choice.

    config: the rules' choice; options that are not tuned are kept
    tokens, rows, cols: sizes of the product
    """

    config: MatvecConfig | BatchConfig
    tokens: int
    rows: int
    cols: int


def choices(problem: Problem, arch: str) -> list[Choice]:
    """List candidates for a problem; all give the same bits as the rules' choice."""
    config = problem.config
    warps = [count for count in (1, 2, 4, 8, 16) if count % config.splits == 0]
    alone = config.splits == 1
    if isinstance(config, BatchConfig):
        deep = (2, 4, 6, 8) if alone else (config.unrolled,)
        return [{"unrolled": n, "warps": count} for n, count in product(deep, warps)]
    found = product((1, 2, 4), (1, 2, 4) if alone else (config.unrolled,), warps)
    return [{"rows": rows, "unrolled": n, "warps": count} for rows, n, count in found]


def measured(
    config: MatvecConfig | BatchConfig, sizes: tuple[int, int, int], device: torch.device
) -> MatvecConfig | BatchConfig:
    """A config of the rules, or the one that was measured to be the fastest for these sizes:
    tokens, rows, columns."""
    problem = Problem(config, *sizes)
    return TUNED.applied(config, device, lambda _: problem, partial(check_options, problem))


def check_options(problem: Problem, config: MatvecConfig | BatchConfig) -> None:
    """ValueError for options of a config that are none of `choices`."""
    for choice in choices(problem, ""):
        if all(getattr(config, name) == value for name, value in choice.items()):
            return
    raise ValueError(f"{config} is not among the choices for its problem")
