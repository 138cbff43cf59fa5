"""Small kernels: the frame around a few lines of PTX, and its launch."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

import ptxemu
from ptxemu.module import Module

HEAD = ".version 8.8\n.target sm_100a\n.address_size 64\n"
REGISTERS = """.reg .pred %p<8>;
.reg .b16 %h<8>;
.reg .b32 %r<64>;
.reg .b64 %rd<16>;
.reg .f32 %f<8>;
.reg .f64 %fd<4>;
"""
DYNAMIC = ".extern .shared .align 1024 .b8 dynamic[];\n"
# the thread's number, pointer `d`, and the address of the thread's word in it
POINTER = "ld.param.u64 %rd1, [d];\nmov.u32 %r0, %tid.x;\nmad.wide.u32 %rd2, %r0, 4, %rd1;\n"
_OPTIONS = {field.name for field in fields(ptxemu.Options)}


def kernel(body: str, params: str = "", before: str = "") -> str:
    """A module with one kernel around `body`."""
    return f"{HEAD}{before}.visible .entry test({params})\n{{\n{REGISTERS}{body}\nret;\n}}\n"


def pointers(*arrays: np.ndarray) -> list[bytes]:
    """Kernel parameters."""
    return [array.ctypes.data.to_bytes(8, "little") for array in arrays]


def launch(program: str | Module, *arrays: np.ndarray, **how: object) -> ptxemu.LaunchReport:
    """Launch one warp with pointers to the arrays, within 20 seconds. `how` overrides this:
    parameters of `Module.launch` and options by name."""
    options = {"limit": 20} | {name: how.pop(name) for name in _OPTIONS & how.keys()}
    if arrays:
        how |= {"params": pointers(*arrays), "memory": list(arrays)}
    module = ptxemu.load(program) if isinstance(program, str) else program
    launched = {"grid": (1,), "block": (32,)} | how
    return module.launch(options=ptxemu.Options(**options), **launched)


# A module of the DSL: reverses a row, and has a race without the barrier.
REVERSE = """
import cutlass, cutlass.cute as cute, torch
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def shift(x: cute.Tensor, barrier: cutlass.Constexpr):
    i, _, _ = cute.arch.thread_idx()
    row = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(64))
    row[i] = x[i]
    if cutlass.const_expr(barrier):
        cute.arch.sync_threads()
    x[i] = row[63 - i]

@cute.jit
def host(x: cute.Tensor, barrier: cutlass.Constexpr):
    shift(x, barrier).launch(grid=(1, 1, 1), block=(64, 1, 1))

"""
