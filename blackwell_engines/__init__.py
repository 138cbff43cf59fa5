"""Other people's models and engines on these kernels; each is imported when it is asked for."""

from kernelkit.call.exports import exports

__version__: str
exports(__name__, {})
