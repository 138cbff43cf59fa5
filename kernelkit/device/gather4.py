"""TMA's tile::gather4 (sm_100a): four rows of a tensor, named one by one, to neighbouring rows of
shared memory (device code).

The DSL has a copy operation for it, which elects a thread for each instruction and reads row
numbers from a tensor. Here one thread starts several panels of the same rows.
Rows out of bounds, negative ones included, arrive as zeros, and their bytes are counted.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cute.nvgpu import cpasync

from kernelkit.device.boxes import Box, TmaTensor, describe

GATHERED = 4  # rows of an instruction
_LEADER = 0xFEFFFFFF  # mask of an address in shared memory: the same one in the pair's leader
_MAP = "!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<128>>"


@cute.jit
def describe_rows(tensor: cute.Tensor, line: Box) -> TmaTensor:
    """Return a tensor (row, column) whose rows `gather_panels` names. line: a box of one row."""
    return describe(cpasync.CopyBulkTensorTileG2SOp(), tensor, line)


def map_of(tma: TmaTensor) -> Int64:
    """Return the address of the tensor map in the parameters of the running kernel."""
    atom = cute_nvgpu.atom_make_exec_tma(tma.atom._trait.value)
    return Int64(cute_nvgpu.get_tma_desc_addr(ir.Type.parse(_MAP), atom).toint())


@cute.jit
def gather_panels(
    pair: cutlass.Constexpr,
    tensor_map: Int64,
    rows: tuple[Int32, ...],
    column: Int32,
    target: Int32,
    barrier: Int32,
    panels: cutlass.Constexpr,
) -> None:
    """Start the copies of some panels of four rows, by the calling thread alone.

    Args:
        pair: whether bytes are counted by the barrier of the pair's leader.
        tensor_map: see `map_of`.
        rows: four numbers.
        column: first column of panel 0.
        target: address in shared memory of the first row's line in panel 0, a multiple of 512.
        barrier: address in this CTA of the mbarrier that counts bytes.
        panels: (columns from panel 0 on, bytes in shared memory from `target` on) of each.
    """
    group, where = (".cta_group::2", barrier & _LEADER) if pair else ("", barrier)
    lines = [
        f"add.s32 column, {{$r1}}, {columns}; add.s32 target, {{$r2}}, {nbytes}; "
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4"
        f".mbarrier::complete_tx::bytes{group} [target], "
        "[{$r0}, {column, {$r4}, {$r5}, {$r6}, {$r7}}], [{$r3}];"
        for columns, nbytes in panels
    ]
    cute.arch.inline_ptx(
        f"{{ .reg .b32 column, target; {' '.join(lines)} }}",
        read_only_args=[tensor_map, column, target, where, *rows],
    )
