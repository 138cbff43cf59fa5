"""How a launch reaches the emulator: the DSL's own host code, run against our runtime symbols.

Nothing here is imported by the rest of ptxemu at import time; torch, the DSL and tvm-ffi are
imported inside functions only, so that `ptxemu.load` works without them.
"""
