"""The emulator compared with a thread-by-thread interpreter, on random structured programs."""

from __future__ import annotations

import random

import numpy as np

import ptxemu
from ptxemu.options import POLICIES
from tests.ptxemu.kernels import launch
from tests.ptxemu.random_programs import MEMORY_WORDS, REGISTERS, Generator, expected, ptx_of

QUICK, LONG = 60, 5000  # programs


def check(seed: int) -> None:
    rng = random.Random(seed)
    program = Generator(rng)
    kinds = tuple(rng.choice(("lane", "uniform")) for _ in range(REGISTERS))
    threads = rng.choice((32, 32, 20, 64))
    memory = np.random.default_rng(seed).integers(0, 1 << 32, MEMORY_WORDS, dtype=np.uint32)
    right = expected(program, kinds, memory, threads)
    text = ptx_of(program, kinds)
    module = ptxemu.load(text)
    for policy in POLICIES:
        out = np.zeros_like(right)
        launch(module, memory, out, block=(threads,), policy=policy, seed=seed, limit=None)
        wrong = np.argwhere(out != right)
        assert not len(wrong), f"seed {seed}, {policy}: (thread, register) {wrong[:5]}\n{text}"


def test_random_programs():
    for seed in range(QUICK):
        check(seed)


def test_many_random_programs():
    for seed in range(QUICK, QUICK + LONG):
        check(seed)
