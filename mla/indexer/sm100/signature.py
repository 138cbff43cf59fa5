"""Host function of the block-scaled scores for the compiler, with example arguments."""

from typing import Any

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Uint8

from kernelkit.device.fake import fake_tensor
from kernelkit.device.param_table import ParamTable
from kernelkit.plan import hw
from mla.indexer.params import ScoresParams
from mla.indexer.scores_config import BlockScaledConfig
from mla.indexer.sm100.kernel import BlockScaledScores


def host_function(config: BlockScaledConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    numbers = Int32(1), Int32(1), CUstream(0)
    return BlockScaledScores(config), (_moved(), _moved()), ParamTable.zeros(ScoresParams), *numbers


def _moved() -> Any:
    """Return a fake TMA tensor: strides of 16 bytes, [slots or tokens, rows or heads, 1, bytes]."""
    size = (cute.sym_int32() for _ in range(4))
    return fake_tensor(Uint8, *size, align=hw.TMA_ALIGN_BYTES)
