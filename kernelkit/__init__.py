"""Shared parts of the kernel packages: plans, device code, compiling, calling, tuning.

`import kernelkit` also makes modules importable by their names in 0.2.0.
"""

from kernelkit.call import moved
from kernelkit.call.exports import exports

moved.install()

__version__: str
exports(__name__, {})
