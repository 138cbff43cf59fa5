"""Choices that are measured on a GPU, and the files that keep them."""

from kernelkit.call.exports import exports

__getattr__, __dir__ = exports(__name__, {"kernelkit.tune.tuner": "Outcome Subject tune"})
