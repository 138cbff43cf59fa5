"""`merge`: partial attention results become one, in one launch."""

from kernelkit.merge.api import merge

__all__ = ["merge"]
