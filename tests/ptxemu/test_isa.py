"""Every program of `ptx/`: under each policy in the emulator, and with --hw on a GPU.

The format of a program is described in `ptx_program`.
"""

from __future__ import annotations

from functools import cache

import pytest

import ptxemu
from lab.silicon.conformance import hw_runner
from lab.silicon.conformance.ptx_program import FOLDER, POLICIES, Program, check, emulate, read
from ptxemu.errors import UnsupportedPtx

FILES = sorted(FOLDER.glob("*.ptx"))


@cache
def _loaded(name: str) -> tuple[Program, ptxemu.Module]:
    program = read(FOLDER / f"{name}.ptx")
    return program, ptxemu.load(program.text)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_program(name: str, policy: str) -> None:
    program, module = _loaded(name)
    check(program, emulate(program, module, ptxemu.Options(policy=policy, seed=1, limit=20)))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("matrix_bytes", (".trans", ""), r"stmatrix of b8 without \.trans"),
        ("shifted_a_mma", ("[%r6], [%r14]", "[%r6], %rd10"), r"\.ashift with A in shared memory"),
        ("shifted_a_mma", ("a::discard", "a::use"), r"\.ashift with \.collector::a::fill or ::use"),
    ],
)
def test_what_no_assembler_takes(name: str, change: tuple[str, str], message: str) -> None:
    program = read(FOLDER / f"{name}.ptx")
    module = ptxemu.load(program.text.replace(*change))
    with pytest.raises(UnsupportedPtx, match=message):
        emulate(program, module, ptxemu.Options())


@pytest.mark.hw
@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_program_on_gpu(name: str) -> None:
    program, _ = _loaded(name)
    check(program, hw_runner.run(program))
