"""Vocabulary that the kernel packages share: limits, plans, pipelines, compiling, launching."""

from kernelkit.exports import exports

__getattr__, __dir__ = exports(__name__, {})
