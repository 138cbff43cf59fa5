"""Weights in GGUF's format Q8_0: kernels that read them in two layouts, with the same bits."""

from typing import TYPE_CHECKING

from kernelkit.call.exports import exports

if TYPE_CHECKING:
    from q8_0.activations import Activations
    from q8_0.api import dequantise, matvec, quantise, repack
    from q8_0.files import GgufFile
    from q8_0.module import Q8Linear
    from q8_0.warm import warmup
    from q8_0.weights import Weights

__all__ = [
    "Activations",
    "GgufFile",
    "Q8Linear",
    "Weights",
    "dequantise",
    "matvec",
    "quantise",
    "repack",
    "warmup",
]

__version__: str
exports(__name__, {
    "q8_0.activations": "Activations",
    "q8_0.api": "dequantise matvec quantise repack",
    "q8_0.files": "GgufFile",
    "q8_0.module": "Q8Linear",
    "q8_0.warm": "warmup",
    "q8_0.weights": "Weights",
})  # fmt: skip
