"""The native tier: its primitives equal the numpy expressions in their names, some instruction
needs each of them, a wrong bit is noticed, and everything works without llvmlite, too.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.silicon.conformance import everything
from ptxemu.codegen import native_writer
from ptxemu.codegen.namespace import GLOBALS
from ptxemu.codegen.program import Program
from ptxemu.module import Module
from ptxemu.native import ir, library, operands, primitives
from ptxemu.native.frame import Frame
from ptxemu.native.ir import BITS, LANES, NUMPY, TABLE, Key
from ptxemu.native.product import ROWS, multiply
from ptxemu.native.recipes import recipe
from tests.ptxemu.kernels import launch
from tests.ptxemu.random_programs import MEMORY_WORDS, REGISTERS, Generator, ptx_of

native = pytest.mark.skipif(library.library() is None, reason="llvmlite is not installed")
SPECIALS = np.array(
    (0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0xBF800000, 0x7F7FFFFF,
     0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00000, 0x7FFFFFFF, 0x33800000, 0x43E00001),
    np.uint32,
)  # fmt: skip
SIGNS = {"neg": "-", "~": "~"}


def words(rng: np.random.Generator, dtype: str) -> np.ndarray:
    """32 lanes: random bits, few bits, or typical corner cases."""
    bits = rng.integers(0, 1 << 64, LANES, np.uint64)
    how = rng.integers(3)
    if dtype == "BOOL":
        return (bits & 1).astype(np.bool_)
    if dtype == "F32":
        few = (rng.integers(-99, 99, LANES) / 8 * 10.0 ** rng.integers(-6, 6)).astype(np.float32)
        return (
            (few, rng.choice(SPECIALS, LANES).view(np.float32))[how - 1]
            if how
            else (bits.astype(np.uint32).view(np.float32))
        )
    if dtype == "F64":
        return rng.standard_normal(LANES) * 10.0 ** rng.integers(-300, 300)
    edges = np.array([0, 1, (1 << BITS[dtype] - 1) - 1, 1 << BITS[dtype] - 1, -1 % (1 << 63)])
    small = bits % np.uint64(2 * BITS[dtype])
    return (bits, small, rng.choice(edges, LANES))[how].astype(np.uint64).astype(NUMPY[dtype])


def in_numpy(key: Key, values: list[np.ndarray]) -> np.ndarray:
    """Evaluate the expression of a key in numpy."""
    (name, *rest), types = key[0].split(" "), key[1]
    names = [f"a{k}" for k in range(len(values))]
    if name in SIGNS:
        text = f"{SIGNS[name]}a0"
    elif name in ("astype", "move", "choose"):
        text = {"astype": f"a0.astype({rest[:1] and rest[0]})", "move": "a0"}.get(name, "")
        text = text or f"choose(a0, a1, a2, {types[1]})"
    elif re.match(r"\w", name):
        quoted, named = ([w for w in rest if (w[0] == "'") == q] for q in (True, False))
        text = f"{name}({', '.join([*names, *quoted, *named])})"
    else:
        text = f"a0 {name} a1"
    with np.errstate(all="ignore"):
        found = eval(text, {**GLOBALS}, dict(zip(names, values, strict=True)))
    return np.broadcast_to(np.asarray(found), LANES)


def by_primitive(found: library.Library, key: Key, values: list[np.ndarray]) -> np.ndarray:
    frame = Frame(found, {})
    places = [frame.room(256 * k, 256) for k in range(len(values) + 1)]
    for value, place, dtype in zip(values, places[1:], key[1], strict=True):
        frame.view(place, dtype)[:] = value
    frame.function([(key, places)])(0, 0)
    return frame.view(places[0], TABLE[key].result).copy()


def unlike(found: library.Library, key: Key, draws: int) -> list[list[np.ndarray]]:
    """Operands for which numpy gives another result."""
    rng = np.random.default_rng(len(key[0]))
    wrong = []
    for _ in range(draws):
        values = [words(rng, dtype) for dtype in key[1]]
        if "minifloat" in key[0]:
            values = [value & 0xFF for value in values]
        right = in_numpy(key, values)
        got = by_primitive(found, key, values)
        if got.dtype != right.dtype or got.tobytes() != np.ascontiguousarray(right).tobytes():
            wrong.append(values)
    return wrong


@native
def test_primitives_are_their_expressions() -> None:
    found = library.library()
    assert found is not None
    assert not [key for key in TABLE if unlike(found, key, 6)]


@native
def test_primitives_are_their_expressions_often() -> None:
    found = library.library()
    assert found is not None
    assert not [key for key in TABLE if unlike(found, key, 400)]


@native
@pytest.mark.parametrize(("n", "k"), [(2, 1), (8, 16), (96, 32), (256, 64)])
@pytest.mark.parametrize("fresh", [0, 1])
def test_products_are_their_definition(n: int, k: int, fresh: int) -> None:
    rng = np.random.default_rng(n)
    d, *parts = (library.aligned(4 * size).view(np.float32) for size in (n * ROWS, n * k, k * ROWS))
    for part in (d, *parts):  # products of so few bits are exact
        part[:] = rng.standard_normal(part.size).astype(np.float16)
    wanted = d.copy()
    multiply(wanted.ctypes.data, *(part.ctypes.data for part in parts), n, k, fresh)
    routine = library.compiled(multiply)
    assert routine is not None
    routine(d.ctypes.data, *(part.ctypes.data for part in parts), n, k, fresh)
    np.testing.assert_array_equal(d.view(np.uint32), wanted.view(np.uint32))


@native
def test_a_wrong_bit_is_noticed(monkeypatch, tmp_path) -> None:
    """The changed library has one primitive that flips the last bit of its result."""
    import llvmlite.binding as llvm

    key = "arith.fma_f32", ("F32", "F32", "F32")
    right = TABLE[key]

    def wrong(b: ir.Body, *values: str) -> str:
        bits = b.cast(right.build(b, *values), "F32", "U32")
        changed = b.do(f"xor {ir.vector('U32')} {bits}, {b.splat('1', 'U32')}")
        return b.cast(changed, "U32", "F32")

    for name, build in (("right", right.build), ("wrong", wrong)):
        with monkeypatch.context() as patch:
            one = ir.Primitive(key[0], key[1], "F32", build)
            patch.setattr(primitives, "TABLE", {key: one})
            patch.setattr(primitives, "ACCESSES", {})
            patch.setattr(primitives, "OPERATIONS", ())
            needed = partial(library.routines_of, operands)  # the product calls one
            source = library.Source(name.encode(), needed, primitives.module)
            found = library.load(llvm, tmp_path / name, source)
        assert bool(unlike(found, key, 3)) == (name == "wrong")


@native
def test_every_key_is_wanted(monkeypatch) -> None:
    """House rule: some instruction's template uses each primitive, except two that the writer
    itself needs."""
    left = {key for key in TABLE if key[0] not in ("move", "choose")}

    def noted(*template: Any) -> Any:
        found = recipe(*template)
        left.difference_update(key for key, _ in found.steps) if found else None
        return found

    monkeypatch.setattr(native_writer, "recipe", noted)
    texts = sorted({case.program.text for case in everything.cases(())})
    for text in (text for first in range(40) for text in texts[first::40]):
        for entry in (module := Module(text)).tree.entries if left else ():
            _all_blocks(module.program(entry))
    assert not left


def _all_blocks(program: Program) -> None:
    for block in program.blocks:
        program.version(block.index, 0, frozenset(program.live_scalars[block.index]))
        program.version(block.index, 2, frozenset())


@native
@pytest.mark.parametrize("thousand", range(20, 40))
def test_random_programs_without_primitives(thousand: int) -> None:
    for seed in range(1000 * thousand, 1000 * (thousand + 1)):
        rng = random.Random(seed)
        program = Generator(rng)
        text = ptx_of(program, tuple(rng.choice(("lane", "uniform")) for _ in range(REGISTERS)))
        memory = np.random.default_rng(seed).integers(0, 1 << 32, MEMORY_WORDS, np.uint32)
        threads = rng.choice((32, 20, 64))
        outs = [np.zeros((threads, REGISTERS), np.uint32) for _ in range(2)]
        launch(Module(text), memory, outs[0], block=(threads,), limit=None)
        with library.without():
            launch(Module(text), memory, outs[1], block=(threads,), limit=None)
        assert np.array_equal(*outs), f"seed {seed}"


WITHOUT = """
import sys
sys.modules["llvmlite"] = None
import pytest
from ptxemu.native.library import library
assert library() is None
chosen = "not matrix and not sweep and not hw"
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", chosen, *sys.argv[1:]]))
"""


def test_all_goes_without_llvmlite() -> None:
    here = Path(__file__).parent
    names = ("test_scheduler.py", "test_tmem.py", "test_check_manual.py", "test_native.py")
    files = [str(here / name) for name in names]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *files, "-k", "not without_llvmlite"],
        cwd=here.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
