"""The old name of `blackwell_engines`, for one release; importing it warns."""

import sys
from importlib import import_module

import kernelkit  # noqa: F401 - it knows what moved
from kernelkit.call.moved import told

told("integrations", "blackwell_engines")
sys.modules[__name__] = import_module("blackwell_engines")
