"""The programs of `ptx/` on other inputs than the tests', until each form has seen a thousand."""

from __future__ import annotations

from collections.abc import Iterator

from lab.silicon.conformance.case import Case, Output
from lab.silicon.conformance.kernel import opcodes
from lab.silicon.conformance.ptx_program import FOLDER, read

WORDS = 1000  # random input words of a program, over all seeds
_SEEDS = 32  # at most, and for a program without random inputs one
# what sm_90a does not have, beside the tensor core; `unavailable` holds the forms
_NEWER = (
    *("cluster_cancel", "matrix_bytes", "memory_wide", "memory_widths"),
    *("tensor_multicast", "warp_reduce_float"),
)
_TENSOR_CORE = "tcgen05"
_SLOT = "%warpid"  # a slot of the multiprocessor, which nothing fixes


def cases() -> Iterator[Case]:
    """Yield a case per program and seed."""
    for path in sorted(FOLDER.glob("*.ptx")):
        text = path.read_text()
        if _TENSOR_CORE in text or path.stem in _NEWER or _SLOT in text:
            continue
        random = sum(b.data.nbytes for b in read(path).buffers() if b.data.view("u1").any()) // 4
        for seed in range(min(-(-WORDS // random), _SEEDS) if random else 1):
            program = read(path, f" {seed}")
            exact = [b for b in program.outputs() if not b.tolerance]
            forms = opcodes(text)
            outputs = {
                b.name: Output(f"{path.stem} {seed} {b.name}", forms, random or b.data.size)
                for b in exact
            }
            for buffer in program.outputs():
                if buffer.tolerance:
                    buffer.expected = None
            if outputs:
                yield Case(f"{path.stem} {seed}", program, outputs, recorded=False)
