"""Host function of the block-scaled scores for the compiler, with example arguments."""

from cuda.bindings.driver import CUstream
from cutlass import Int32

from kernelkit.device.param_table import ParamTable
from mla.indexer.params import ScoresParams
from mla.indexer.scores_config import BlockScaledConfig
from mla.indexer.shared.args import fake_operand
from mla.indexer.sm100.kernel import BlockScaledScores


def host_function(config: BlockScaledConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    numbers = Int32(1), Int32(1), CUstream(0)
    operands = fake_operand(), fake_operand()
    return BlockScaledScores(config), operands, ParamTable.zeros(ScoresParams), *numbers
