"""What the kernel packages share: plans, device code, compiling, calling, tuning.

`import kernelkit` also lets modules be found by the names that they had in 0.2.0.
"""

from kernelkit.call import moved
from kernelkit.call.exports import exports

moved.install()

__getattr__, __dir__ = exports(__name__, {})
