"""Programmatic dependent launch of kernels that wait before all else (device code)."""

import cutlass.cute as cute


@cute.jit
def follow() -> None:
    """All threads, first of all: wait until the kernel in front on the stream is done, and let the
    one behind begin, which waits in turn. What a launch costs then passes under other kernels."""
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
