"""The instructions: one small emitter each, registered by opcode with its PTX ISA section.

Importing this package fills the registry. An emitter gets the lowering context, the instruction and
its matched form, and states what the instruction does to the machine; it never looks at a kernel.
The runtime function of an instruction is in the same file, below its emitter.
"""

from ptxemu.codegen import registry
from ptxemu.ops import (  # noqa: F401  (imported for their registrations)
    async_copy,
    atomics,
    barriers,
    cluster_launch,
    compare,
    control,
    convert,
    floats,
    integers,
    jumps,
    load_store,
    matrix_copy,
    mbarrier,
    system_calls,
    tcgen05_copy,
    tcgen05_mma,
    tensor_copy,
    warp,
    warp_mma,
    wgmma,
    wmma,
)

__all__ = ["registry"]
