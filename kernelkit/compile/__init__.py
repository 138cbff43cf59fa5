"""Compilation of a config to a kernel, and the folders that keep it."""

from kernelkit.call.exports import exports

__getattr__, __dir__ = exports(
    __name__, {"kernelkit.compile.compiler": "collecting compile_once forget in_memory"}
)
