"""Model of a kernel's time on a GPU, from its machine code and a recorded run on a CPU."""

from ptxemu.version import __version__

__all__ = ["__version__"]
