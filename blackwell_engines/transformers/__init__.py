"""Models of Hugging Face transformers on these kernels; `register()` is the way in."""

from typing import TYPE_CHECKING

from kernelkit.call.exports import exports

if TYPE_CHECKING:
    from blackwell_engines.transformers.packing import pack_experts
    from blackwell_engines.transformers.registry import NAME, register

__all__ = ["NAME", "pack_experts", "register"]

__version__: str
exports(__name__, {
    "blackwell_engines.transformers.packing": "pack_experts",
    "blackwell_engines.transformers.registry": "NAME register",
})  # fmt: skip
