"""Copy scale factors of rows to the blocks of their experts, once for every choice (device code).

The rows of a block are shared as in `blocks.row_of_thread`. Each of the four neighbours of a row
reads CODE_WORDS words at a time, and writes one word to each of as many atoms.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from kernelkit.device.dependent import follow
from kernelkit.device.fake import fake_tensor
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


@dataclass(frozen=True)
class Factors:
    """Scale factors int32, [T, words] of rows or [words] of all blocks; and the global scales of
    the rows with their inverses, fp32, or None."""

    codes: cute.Tensor
    encode: cute.Tensor | None
    decode: cute.Tensor | None


class Spread:
    """Host function and kernel of one SpreadConfig."""

    def __init__(self, config: SpreadConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        inputs: tuple[cute.Tensor | None, ...],
        outputs: tuple[cute.Tensor | None, ...],
        tables: tuple[cute.Tensor, ...],
        grid: tuple[Int32, ...],
        stream: CUstream,
    ) -> None:
        """Launch the kernel.

        Args:
            inputs: the fields of `Factors` of T rows.
            outputs: the fields of `Factors` of the R rows of all blocks.
            tables: rows int32 [R] and offsets int32 [E + 1].
            grid: CTAs that share the atoms of a block, blocks, and atoms of a block.
        """
        config, (ctas, blocks, atoms) = self.config, grid
        self.kernel(Factors(*inputs), Factors(*outputs), *tables, atoms).launch(
            grid=(ctas, config.parts, blocks),
            block=(config.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        inputs: Factors,
        outputs: Factors,
        rows: cute.Tensor,
        offsets: cute.Tensor,
        atoms: Int32,
    ) -> None:
        """Grid (CTAs that share a part, parts of a block, blocks); see `__call__`."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        cta, part, block = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        follow()
        sRows = SmemAllocator().allocate_tensor(Int32, cute.make_layout(2))
        first, end = rows_of_block(offsets, block, thread, sRows)
        inside, word = row_of_thread(part, config.parts, thread)
        row, neighbour = first + inside, thread % SCALE_COLUMNS
        if first != NO_ROWS:
            if first + part * (ROWS_OF_QUARTER // config.parts) < end:
                is_row = row < end
                source = rows[row] // config.choices if is_row else Int32(0)
                if cutlass.const_expr(config.of_rows):
                    if is_row and cta == 0 and neighbour == 0:
                        encode, decode = inputs.encode[source], inputs.decode[source]
                        outputs.encode[row], outputs.decode[row] = encode, decode
                begin = Int64(block) * atoms * SCALE_ROWS + word
                turns, step = ceil_div(atoms, CODE_WORDS), ctas * SCALE_COLUMNS
                mine = cta * SCALE_COLUMNS + neighbour
                for turn in cutlass.range(mine, turns, step, unroll=LOADS_IN_FLIGHT):
                    codes = cute.make_rmem_tensor(CODE_WORDS, Int32)
                    codes.fill(0)
                    if is_row:
                        gCodes = cute.local_tile(inputs.codes[source, None], (CODE_WORDS,), (turn,))
                        cute.autovec_copy(gCodes, codes)
                    for index in cutlass.range_constexpr(CODE_WORDS):
                        atom = turn * CODE_WORDS + index
                        if atom < atoms:
                            outputs.codes[begin + Int64(atom) * SCALE_ROWS] = codes[index]
            else:
                parts = config.parts
                clear_part(outputs.codes, atoms, block, part, parts, cta, ctas, thread)


def host_function(config: SpreadConfig, _arch: str) -> tuple:
    """Return the host function to compile for `config`, and example arguments."""
    tokens, count, words = (cute.sym_int32() for _ in range(3))
    columns = cute.sym_int32(divisibility=CODE_WORDS)
    once = fake_tensor(Int32, tokens, columns, align=VECTOR_BYTES)
    scales = fake_tensor(Int32, words, align=VECTOR_BYTES)

    def given(rows: Any) -> tuple:
        return tuple(fake_tensor(Float32, rows) if config.of_rows else None for _ in range(2))

    rows, offsets = fake_tensor(Int32, count), fake_tensor(Int32, cute.sym_int32())
    inputs, outputs = (once, *given(tokens)), (scales, *given(count))
    grid = (Int32(0), Int32(0), Int32(0))
    return Spread(config), inputs, outputs, (rows, offsets), grid, CUstream(0)
