"""Hardware limits, each number with its source: pure constants.

Numbers without an architecture are those of compute capability 10.0; 9.0 has the same ones, but no
tensor memory. The source is CUDA C++ Programming Guide 13, table "Technical Specifications per
Compute Capability", unless a line names another.
"""

WARP_THREADS = 32
WARPGROUP_WARPS = 4

SMEM_BYTES_PER_CTA = 232_448  # 227 KiB: 228 KiB per SM less 1 KiB that the system reserves
SMEM_RESERVED_BYTES = 1024  # of every CTA
SMEM_BYTES_PER_SM = SMEM_BYTES_PER_CTA + SMEM_RESERVED_BYTES
SMEM_LINE_BYTES = 128  # the widest line inside which a swizzle moves (PTX ISA, "Swizzling modes")
SMEM_UNIT_BYTES = 16  # what it moves as a whole
SMEM_SWIZZLE_ALIGN = 1024  # a 128-byte swizzle atom is 8 rows x 128 B (PTX ISA, tcgen05 layouts)
L2_LINE_BYTES = 128  # four sectors of 32 bytes

TMEM_LANES = 128  # PTX ISA, "Tensor Memory": 128 lanes x 512 columns x 32 bit per CTA
TMEM_COLUMNS = 512
TMEM_ALLOC_MIN_COLUMNS = 32  # PTX ISA, tcgen05.alloc: a power of two, at least 32
TMEM_CELL_BYTES = 4

SMS = 148  # of a B200, which a grid has to fill: what FA4 and cuDNN report for it
# Of the largest GPU of an architecture that is sold: A100, RTX 3090, Jetson Orin, RTX 4090, H100,
# B200, B300, RTX 5090, DGX Spark (their data sheets). A launch asks the GPU itself.
SMS_OF = {
    "sm_80": 108, "sm_86": 82, "sm_87": 16, "sm_89": 128, "sm_90a": 132, "sm_100a": SMS,
    "sm_103a": 148, "sm_120a": 170, "sm_121a": 48,
}  # fmt: skip
L2_BYTES_OF = {
    "sm_80": 40 << 20, "sm_86": 6 << 20, "sm_87": 4 << 20, "sm_89": 72 << 20, "sm_90a": 50 << 20,
    "sm_100a": 126 << 20, "sm_103a": 126 << 20, "sm_120a": 96 << 20,
    "sm_121a": 24 << 20,
}  # fmt: skip
_SMALL, _MEDIUM = 101_376, 166_912  # 99 KiB of 100 per SM, 163 of 164
_SMEM_OF = {
    "sm_80": _MEDIUM, "sm_86": _SMALL, "sm_87": _MEDIUM, "sm_89": _SMALL, "sm_120a": _SMALL,
    "sm_121a": _SMALL,
}  # fmt: skip


def smem_bytes_per_cta(arch: str) -> int:
    """Shared memory that a CTA may have at most."""
    return _SMEM_OF.get(arch, SMEM_BYTES_PER_CTA)


def smem_bytes_per_sm(arch: str) -> int:
    """Shared memory of all CTAs of an SM, with what the system reserves of each."""
    return smem_bytes_per_cta(arch) + SMEM_RESERVED_BYTES


REGISTERS_PER_SM = 65_536
REGISTERS_PER_THREAD = 255
SETMAXNREG = range(24, 257, 8)  # PTX ISA, setmaxnreg: a multiple of 8 in 24..256
MAX_THREADS_PER_CTA = 1024

NAMED_BARRIERS = 16  # of a CTA (PTX ISA, "barrier")
FIRST_NAMED_BARRIER = 1  # 0 is that of bar.sync without a name: all threads of the CTA

MBARRIER_BYTES = 8  # PTX ISA, "mbarrier": an opaque 64-bit object
MBARRIER_MAX_ARRIVALS = (1 << 20) - 1  # PTX ISA, mbarrier: range of the arrival count

TMA_ALIGN_BYTES = 16  # CUDA driver API, cuTensorMapEncodeTiled: base address and strides
TMA_MAX_STRIDE_BYTES = 1 << 40  # same page

MAX_GRID_YZ = 65_535
