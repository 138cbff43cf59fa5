"""Which tcgen05.ld may be under way at an arrival, read off the program (`check.tensor_loads`).
What ptxas does with each of these is in docs/ptxemu/checker.md."""

from __future__ import annotations

import pytest

import ptxemu
from ptxemu.check.tensor_loads import flying
from tests.ptxemu.kernels import kernel

LOAD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r3, %r4}, [%r1];\n"
OTHER = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r6}, [%r1];\n"
WAIT = "tcgen05.wait::ld.sync.aligned;\n"
ADD = "add.u32 %r5, %r3, %r4;\n"
ARRIVE = "mbarrier.arrive.shared.b64 _, [%r2];\n"
STORE, KEEP = "st.shared.b32 [%r9], %r5;\n", "st.shared.b32 [%r9+4], %r5;\n"
BRANCH = "setp.eq.u32 %p0, %r8, 0;\n@%p0 bra L;\n"

CASES = {  # body, and how many loads may be under way at the last arrival; all need %r5 at the end
    "nothing": ("", 0),
    "a load": (LOAD, 1),
    "a wait": (LOAD + WAIT, 0),
    "a wait for stores": (LOAD + WAIT.replace("::ld", "::st"), 1),
    "arithmetic": (LOAD + ADD, 1),
    "a shuffle": (LOAD + ADD + "shfl.sync.bfly.b32 %r5, %r5, 1, 31, -1;\n", 1),
    "a reduction over lanes": (LOAD + ADD + "redux.sync.max.s32 %r5, %r5, -1;\n", 1),
    "a vote": (LOAD + ADD + "setp.eq.u32 %p1, %r5, 0;\nvote.sync.any.pred %p2, %p1, -1;\n", 1),
    "a store": (LOAD + ADD + STORE, 0),
    "a store of one register": (LOAD + "st.shared.b32 [%r9], %r3;\n" + ADD, 0),
    "a store of something else": (LOAD + ADD + STORE.replace("%r5", "%r8"), 1),
    "a store to where the data says": (LOAD + ADD + "st.shared.b32 [%r5], %r8;\n", 0),
    "a store that the data permits": (
        f"{LOAD}{ADD}setp.eq.u32 %p1, %r5, 0;\n@%p1 st.shared.b32 [%r9], %r8;\n",
        0,
    ),
    "a branch that the data takes": (
        f"{LOAD}{ADD}setp.eq.u32 %p1, %r5, 0;\n@%p1 bra L;\nadd.u32 %r5, %r5, 1;\nL:\n",
        1,  # ptxas makes a selection of it
    ),
    "a reduction to memory": (LOAD + ADD + "red.shared.add.u32 [%r9], %r5;\n", 0),
    "a store to tensor memory": (
        f"{LOAD}{ADD}tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], {{%r5}};\n",
        0,
    ),
    "a store to local memory": (LOAD + ADD + "st.local.b32 [scratch], %r5;\n", 1),
    "two loads, one stored": (LOAD + OTHER + ADD + STORE + "add.u32 %r5, %r5, %r6;\n", 1),
    "two loads, their sum stored": (LOAD + OTHER + ADD + "add.u32 %r5, %r5, %r6;\n" + STORE, 0),
    "moves": (LOAD + "mov.b64 %rd3, {%r3, %r4};\nmov.b64 {%r5, %r7}, %rd3;\n" + STORE, 0),
    "a store on one path": (LOAD + ADD + BRANCH + STORE + "L:\n", 1),
    "a wait on one path": (LOAD + ADD + BRANCH + WAIT + "L:\n", 1),
    "a load on one path": (BRANCH + LOAD + ADD + "L:\n", 1),
    "a register that is overwritten": (LOAD + ADD + "mov.u32 %r5, 0;\n" + BRANCH + "L:\n", 0),
    "a loop": (f"L:\n{ARRIVE}{LOAD}{ADD}{STORE}{BRANCH}", 0),
    "a loop that carries the load": (f"L:\n{STORE}{ARRIVE}{LOAD}{ADD}{BRANCH}", 1),
}


@pytest.mark.parametrize("name", CASES)
def test_loads_under_way_at_an_arrival(name: str):
    body, expected = CASES[name]
    text = kernel(f".local .b32 scratch;\n{body}{ARRIVE}{KEEP}")
    program = ptxemu.load(text).program(None)
    arrivals = [k for k, instr in enumerate(program.sites) if instr.root == "mbarrier"]
    found = flying(program.blocks, program.site_of)
    assert len(found[arrivals[-1]]) == expected


def test_a_loop_is_followed_until_nothing_changes():
    """The arrival comes before the load in the text, and behind it in the next iteration."""
    program = ptxemu.load(kernel(f"L:\n{ARRIVE}{STORE}{LOAD}{ADD}{BRANCH}{KEEP}")).program(None)
    (arrival,) = (k for k, instr in enumerate(program.sites) if instr.root == "mbarrier")
    (load,) = (k for k, instr in enumerate(program.sites) if instr.opcode.startswith("tcgen05.ld"))
    assert flying(program.blocks, program.site_of)[arrival] == {load}
