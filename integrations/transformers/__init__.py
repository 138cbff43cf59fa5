"""Models of Hugging Face transformers on these kernels; `register()` is the way in."""

from typing import TYPE_CHECKING

from kernelkit.exports import exports

if TYPE_CHECKING:
    from integrations.transformers.packing import pack_experts
    from integrations.transformers.registry import NAME, register

__all__ = ["NAME", "pack_experts", "register"]

__getattr__, __dir__ = exports(__name__, {
    "integrations.transformers.packing": "pack_experts",
    "integrations.transformers.registry": "NAME register",
})  # fmt: skip
