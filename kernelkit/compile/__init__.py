"""Compilation of a config to a kernel, and the folders that keep it."""

from typing import TYPE_CHECKING

from kernelkit.call.exports import exports

if TYPE_CHECKING:
    from kernelkit.compile.compiler import collecting, compile_once, forget, in_memory

__all__ = ["collecting", "compile_once", "forget", "in_memory"]

exports(__name__, {"kernelkit.compile.compiler": "collecting compile_once forget in_memory"})
