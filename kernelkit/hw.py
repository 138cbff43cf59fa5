"""What the hardware can hold, each number with its source: pure constants.

They are those of compute capability 10.0; 9.0 has the same ones but for tensor memory, which it
lacks, and the number of SMs. CUDA C++ Programming Guide 13, table "Technical Specifications per
Compute Capability" unless a line says otherwise.
"""

WARP_THREADS = 32
WARPGROUP_WARPS = 4

SMEM_BYTES_PER_CTA = 232_448  # 227 KiB: 228 KiB per SM less 1 KiB that the system reserves
SMEM_RESERVED_BYTES = 1024  # of every CTA
SMEM_BYTES_PER_SM = SMEM_BYTES_PER_CTA + SMEM_RESERVED_BYTES
SMEM_LINE_BYTES = 128  # the widest line inside which a swizzle moves (PTX ISA, "Swizzling modes")
SMEM_UNIT_BYTES = 16  # what it moves as a whole
SMEM_SWIZZLE_ALIGN = 1024  # a 128-byte swizzle atom is 8 rows x 128 B (PTX ISA, tcgen05 layouts)

TMEM_LANES = 128  # PTX ISA, "Tensor Memory": 128 lanes x 512 columns x 32 bit per CTA
TMEM_COLUMNS = 512
TMEM_ALLOC_MIN_COLUMNS = 32  # PTX ISA, tcgen05.alloc: a power of two, at least 32
TMEM_CELL_BYTES = 4

SMS = 148  # of a B200, which a grid has to fill: what FA4 and cuDNN report for it
SMS_OF = {"sm_90a": 132, "sm_100a": SMS}  # of an H100 or H200 and of a B200
L2_BYTES_OF = {"sm_90a": 50 << 20, "sm_100a": 126 << 20}  # of the same

REGISTERS_PER_SM = 65_536
REGISTERS_PER_THREAD = 255
SETMAXNREG = range(24, 257, 8)  # PTX ISA, setmaxnreg: a multiple of 8 in 24..256
MAX_THREADS_PER_CTA = 1024

MBARRIER_BYTES = 8  # PTX ISA, "mbarrier": an opaque 64-bit object
MBARRIER_MAX_ARRIVALS = (1 << 20) - 1  # PTX ISA, mbarrier: range of the arrival count

TMA_ALIGN_BYTES = 16  # CUDA driver API, cuTensorMapEncodeTiled: base address and strides
TMA_MAX_STRIDE_BYTES = 1 << 40  # same page

MAX_GRID_YZ = 65_535
