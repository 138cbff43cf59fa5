"""Scale factors of rows to the blocks of their experts, a copy for every choice (device code).

The rows of a block are shared as `blocks.row_of_thread` says; of a row each of four neighbours
reads CODE_WORDS words at a time, and writes a word to as many atoms.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_tensor

from moe.formats import SCALE_COLUMNS, SCALE_ROWS
from moe.quantiser.blocks import (
    NO_ROWS,
    ROWS_OF_QUARTER,
    ceil_div,
    clear_part,
    row_of_thread,
    rows_of_block,
)
from moe.quantiser.config import CODE_WORDS, VECTOR_BYTES, SpreadConfig

LOADS_IN_FLIGHT = 4


class Spread:
    """Host function and kernel of one SpreadConfig."""

    def __init__(self, config: SpreadConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self, inputs: tuple, outputs: tuple, tables: tuple, grid: tuple, stream: CUstream
    ) -> None:
        """inputs: scale factors int32 [T, words], and the global scales of the rows with their
        inverses, fp32 [T], or None. outputs: likewise, int32 [words] of all blocks and fp32 [R].

        tables: rows int32 [R] and offsets int32 [E + 1]. grid: CTAs that take turns at the atoms of
        a block, blocks, and atoms beside each other.
        """
        config, (ctas, blocks, atoms) = self.config, grid
        self.kernel(inputs, outputs, tables, atoms).launch(
            grid=(ctas, config.parts, blocks), block=(config.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, inputs: tuple, outputs: tuple, tables: tuple, atoms: Int32) -> None:
        """Grid (CTAs that share a part, parts of a block, blocks); see `__call__`."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        cta, part, block = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        rows, offsets = tables
        first, end = rows_of_block(offsets, block, thread)
        inside, word = row_of_thread(part, config.parts, thread)
        row, neighbour = first + inside, thread % SCALE_COLUMNS
        if first != NO_ROWS:
            if first + part * (ROWS_OF_QUARTER // config.parts) < end:
                is_row = row < end
                source = rows[row] // config.choices if is_row else Int32(0)
                if cutlass.const_expr(config.of_rows):
                    if is_row and cta == 0 and neighbour == 0:
                        outputs[1][row], outputs[2][row] = inputs[1][source], inputs[2][source]
                begin = Int64(block) * atoms * SCALE_ROWS + word
                turns, step = ceil_div(atoms, CODE_WORDS), ctas * SCALE_COLUMNS
                mine = cta * SCALE_COLUMNS + neighbour
                for turn in cutlass.range(mine, turns, step, unroll=LOADS_IN_FLIGHT):
                    codes = cute.make_rmem_tensor(CODE_WORDS, Int32)
                    codes.fill(0)
                    if is_row:
                        gCodes = cute.local_tile(inputs[0][source, None], (CODE_WORDS,), (turn,))
                        cute.autovec_copy(gCodes, codes)
                    for index in cutlass.range_constexpr(CODE_WORDS):
                        atom = turn * CODE_WORDS + index
                        if atom < atoms:
                            outputs[0][begin + Int64(atom) * SCALE_ROWS] = codes[index]
            else:
                clear_part(outputs[0], atoms, (block, part), (cta, ctas, thread), config.parts)


def host_function(config: SpreadConfig, _arch: str) -> tuple:
    """What is compiled for `config`, and example arguments."""
    return Spread(config), *_arguments(config)


def _arguments(config: SpreadConfig) -> tuple:
    tokens, count, words = (cute.sym_int32() for _ in range(3))
    shape = (tokens, cute.sym_int32(divisibility=CODE_WORDS))
    stride = cute.sym_int64(divisibility=CODE_WORDS)
    once = make_fake_tensor(Int32, shape, (stride, 1), assumed_align=VECTOR_BYTES)
    scales = make_fake_tensor(Int32, (words,), (1,), assumed_align=VECTOR_BYTES)

    def given(rows: Any) -> tuple:
        if not config.of_rows:
            return None, None
        return tuple(make_fake_tensor(Float32, (rows,), (1,)) for _ in range(2))

    rows = make_fake_tensor(Int32, (count,), (1,))
    offsets = make_fake_tensor(Int32, (cute.sym_int32(),), (1,))
    grid = (Int32(0), Int32(0), Int32(0))
    return (once, *given(tokens)), (scales, *given(count)), (rows, offsets), grid, CUstream(0)
