"""Published kernels that ptxemu executes as they are: one row for each call, with pinned versions.

Exactly these releases are installed, without their dependencies: a row lists those that its kernels
need and that the environment of the tests lacks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    script: str  # a file of scripts/, without .py
    gpu: str
    requirements: tuple[str, ...]  # NAME==VERSION; the tested package is the first
    called: str  # function, shapes and dtypes, in words
    bound: float  # on the largest absolute error
    argument: str = ""  # of the script
    kernels: int = 1  # number of launches at least

    @property
    def name(self) -> str:
        return f"{self.script}-{self.argument or self.gpu}"


TRITON = ("triton==3.9.0",)
QUACK = ("quack-kernels==0.6.5", "torch-c-dlpack-ext==0.1.5", "einops==0.8.2", *TRITON)
ATTENTION = ("flash-attn-4==4.0.0b36", *QUACK)
MJOLNIR = ("mjolnir-kernel==0.1.0",)
TRIMUL = ("fast-trimul==3.0.6",)
MSA = ("flash-msa==0.1.1",)
HELION = (
    "helion==1.5.1", *TRITON, "filecheck==1.0.6", "psutil==7.2.2", "scikit-learn==1.9.1",
    "scipy==1.17.1", "joblib==1.6.0", "threadpoolctl==3.8.0",
)  # fmt: skip
NVRTC = (
    "nvidia-cuda-nvrtc==13.5.37", "nvidia-cuda-cccl==13.3.5.0.6", "nvidia-cuda-crt==13.5.37",
    "nvidia-cuda-runtime==13.5.37",
)  # fmt: skip
NUMBA = ("numba-cuda==0.30.4", "numba==0.68.1", "nvidia-nvvm==13.5.37", *NVRTC)
CUPY = ("cupy-cuda13x==14.2.0", "fastrlock==0.8.4", "cuda-pathfinder==1.9.1", *NVRTC)
TILELANG = (
    "tilelang==0.1.15", "z3-solver==4.15.4.0", "apache-tvm-ffi==0.1.12", "ml_dtypes==0.6.0",
    "cloudpickle==3.1.3", "psutil==7.2.2", "torch-c-dlpack-ext==0.1.5", *NVRTC,
)  # fmt: skip
DIST_MOE = ("dist-moe==0.1.0", "triton==3.8.0")
OPERATORS = ("nvidia-cutlass-operators==0.3.0", "torch-c-dlpack-ext==0.1.5")
CUDNN = ("nvidia-cudnn-frontend==1.32.0",)
FLASHLIB = ("flashlib==0.4.0", *TRITON)
FLASHINFER = (
    "flashinfer-python==0.7.4", "cuda-tile==1.7.0", "einops==0.8.2", "nccl-extensions==0.1.0",
    "nccl4py==0.6.0", "ninja==1.13.2", "nvidia-cudnn-frontend==1.32.0", "nvidia-ml-py==13.615.71",
    "tabulate==0.10.0",
)  # fmt: skip

ATTENTION_64 = "`flash_attn_func`, head dim 64, 128 tokens, causal, bf16"
SWIGLU = "`gemm_swiglu_wrapper_sm100`, 128 x 256 x 192, bf16"
PRODUCT_TILELANG = "product of 128 x 64 x 96 with two stages, fp16"
PRODUCT_OPERATORS = "`get_operators`, the first product of 128 x 128 x 128, fp16"
PRODUCT_QUACK = "`gemm`, 256 x 128 x 192, bf16, untuned"
NORMS_QUACK = "`rmsnorm`, `softmax`, `topk`, rows of 1,024, bf16"
KERNELS_CUPY = "`RawKernel`, `RawModule`, `ElementwiseKernel`, `sum`, fp32"
CUB = "CUB's radix sort and scan of a block, fp32"
DESCRIPTORS = "product through device descriptors, 200 x 136 x 160, fp16"
GROUPS = "grouped product of 4 experts, RMSNorm, bf16"
NEAREST = "scaling of columns, 8 nearest of 256 points, fp32"

# fmt: off
TABLE = (
    Published("flash_attention", "h100", ATTENTION, ATTENTION_64, 0.02),
    Published("flash_attention", "b200", ATTENTION, ATTENTION_64, 0.02),
    Published("mjolnir_decode", "thor", MJOLNIR, "`T5DecodeRunner`, two requests, FP8 cache", 0.01),
    Published("trimul_eager", "a100", TRIMUL, "`FastTriangleMultiplication`, 16 residues", 0.01),
    Published("trimul_graph", "a100", TRIMUL, "the same, 8 residues, in a CUDA graph", 0.0),
    Published("msa_blocks", "h100", MSA, "`select_blocks`, 384 tokens, bf16", 0.0),
    Published("helion_kernels", "b200", HELION, "an addition, a product, bf16", 1e-4, kernels=2),
    Published("triton_descriptors", "h100", TRITON, DESCRIPTORS, 1e-4),
    Published("triton_descriptors", "b200", TRITON, DESCRIPTORS, 1e-4),
    Published("triton_rows", "b200", TRITON, "`cumsum` and `sort`, rows of 256, fp32", 2e-5),
    Published("triton_atomics", "h100", TRITON, "atomics and a lock over 8 blocks", 0.0),
    Published("numba_kernels", "h100", NUMBA, "product, histogram by atomics", 1e-4, kernels=2),
    Published("cupy_kernels", "h100", CUPY, KERNELS_CUPY, 1e-4, kernels=4),
    Published("tilelang_product", "a100", TILELANG, PRODUCT_TILELANG, 1e-4, "sm_80"),
    Published("tilelang_product", "h100", TILELANG, PRODUCT_TILELANG, 1e-4, "sm_90a"),
    Published("nvrtc_cub", "h100", NVRTC, CUB, 1e-4, "sm_90a"),
    Published("quack_norms", "h100", QUACK, NORMS_QUACK, 0.05, kernels=3),
    Published("quack_product", "h100", QUACK, PRODUCT_QUACK, 1e-3),
    Published("quack_product", "b200", QUACK, PRODUCT_QUACK, 1e-3),
    Published("dist_moe_groups", "b200", DIST_MOE, GROUPS, 0.13, kernels=2),
    Published("cutlass_operators", "b200", OPERATORS, PRODUCT_OPERATORS, 0.1, "100a"),
    Published("cudnn_swiglu", "b200", CUDNN, SWIGLU, 0.5),
    Published("flashlib_scaler", "h100", FLASHLIB, NEAREST, 1e-5, kernels=2),
    Published("flashinfer_norm", "h100", FLASHINFER, "`rmsnorm`, rows of 512, bf16", 0.05),
)
# fmt: on
