"""Path of a launch to the emulator: the DSL's own host code, run against our runtime symbols.

The rest of ptxemu imports nothing from here at import time. Torch, the DSL and tvm-ffi are imported
inside functions only, so that `ptxemu.load` works without them.
"""
