"""Models of Hugging Face transformers on these kernels; `register()` is the way in."""

from typing import TYPE_CHECKING

from kernelkit.exports import exports

if TYPE_CHECKING:
    from integrations.transformers.registry import NAME, register

__all__ = ["NAME", "register"]

__getattr__, __dir__ = exports(__name__, {
    "integrations.transformers.registry": "NAME register",
})  # fmt: skip
