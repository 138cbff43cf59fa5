"""Choices that are measured on a GPU, and the files that keep them."""

from typing import TYPE_CHECKING

from kernelkit.call.exports import exports

if TYPE_CHECKING:
    from kernelkit.tune.tuner import Outcome, Subject, tune

__all__ = ["Outcome", "Subject", "tune"]

exports(__name__, {"kernelkit.tune.tuner": "Outcome Subject tune"})
