"""BlockScaledConfig -> the compiled kernel."""

from typing import Any

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Uint8
from cutlass.cute.runtime import make_fake_tensor

from kernelkit import hw
from kernelkit.compile import compile_once
from kvcache.indexer.scores_config import BlockScaledConfig
from kvcache.indexer.scores_device import FIELDS
from kvcache.indexer.sm100.kernel import BlockScaledScores
from kvcache.kernels.device import table_of


def compile_block_scaled(config: BlockScaledConfig, arch: str = "sm_100a") -> Any:
    """The compiled `BlockScaledScores.__call__` of `config`; compiled once per process."""

    def describe() -> tuple:
        operands = (_moved(), _moved())
        return BlockScaledScores(config), operands, table_of([0] * FIELDS), *_numbers()

    return compile_once(config, arch, describe)


def _numbers() -> tuple:
    return Int32(1), Int32(1), CUstream(0)


def _moved() -> Any:
    """What TMA moves: strides of 16 bytes, [slots or tokens, rows or heads, 1, bytes]."""
    size = tuple(cute.sym_int32() for _ in range(4))
    strides = tuple(cute.sym_int64(divisibility=hw.TMA_ALIGN_BYTES) for _ in size[:-1])
    return make_fake_tensor(Uint8, size, (*strides, 1), assumed_align=hw.TMA_ALIGN_BYTES)
