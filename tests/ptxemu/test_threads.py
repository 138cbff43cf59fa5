"""Threads that launch at the same time: each result is that of the launch alone."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import ptxemu
from ptxemu.host.allocations import LiveTensors
from ptxemu.host.emulator import Emulator
from ptxemu.host.interception import intercepted
from ptxemu.host.runtime_symbols import Run
from ptxemu.host.torch_shim import torch_without_gpu
from ptxemu.one_launch import launch_lock
from ptxemu.options import Options
from ptxemu.watch import watched
from tests.ptxemu.kernels import POINTER, kernel, launch

THREADS = 8

# Each lane sums up; values that differ between lanes are in the program's scratch memory.
SUMS = kernel(
    f"""{POINTER}
    ld.global.b32 %r1, [%rd2];
    mov.u32 %r2, 0;
    mov.u32 %r3, 0;
    AGAIN:
    mad.lo.u32 %r2, %r2, 5, %r1;
    xor.b32 %r4, %r2, %r0;
    shfl.sync.bfly.b32 %r5, %r4, 1, 31, 0xffffffff;
    add.u32 %r2, %r2, %r5;
    add.u32 %r3, %r3, 1;
    setp.lt.u32 %p0, %r3, 40;
    @%p0 bra AGAIN;
    st.global.b32 [%rd2], %r2;""",
    ".param .u64 d",
)


@contextmanager
def hurried():
    """Make Python switch threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def in_threads(work, count=THREADS):
    """Return the results or exceptions of work(0), work(1), ..., each in a separate thread."""
    results = [None] * count
    start = threading.Barrier(count)

    def run(number):
        start.wait()
        try:
            results[number] = work(number)
        except BaseException as error:  # noqa: BLE001  (the test looks at it)
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    with hurried():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    return results


def summed(program, number, **how):
    words = np.arange(64, dtype=np.uint32) * (number + 1)
    report = launch(program, words, block=(64,), **how)
    return words.tolist(), report.findings


@pytest.mark.parametrize("checked", [False, True])
def test_launches_of_one_program(checked):
    program = ptxemu.load(SUMS)
    alone = [summed(ptxemu.load(SUMS), number) for number in range(THREADS)]

    def work(number):
        return [summed(program, number, check=checked) for _ in range(4)]

    assert in_threads(work) == [[one] * 4 for one in alone]


def test_a_launch_that_is_told_of_its_progress_may_launch():
    """The lock is reentrant within a thread."""
    program, inner = ptxemu.load(SUMS), []

    def work(number):
        with Run(lambda request: inner.append(request)):
            return summed(program, number)

    assert in_threads(work, 2) == [summed(ptxemu.load(SUMS), number) for number in range(2)]


def test_a_fork_may_launch_while_a_thread_of_its_parent_does():
    program, held, done = ptxemu.load(SUMS), threading.Event(), threading.Event()

    def hold():
        with launch_lock():
            held.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(60)
    child = os.fork()
    if not child:
        good = summed(program, 3) == summed(program, 3)
        os._exit(0 if good else 1)
    done.set()
    holder.join()
    assert os.waitpid(child, 0)[1] == 0


def test_a_thread_of_a_script_is_watched_and_sees_the_pretended_gpu():
    program, emulator = ptxemu.load(SUMS), Emulator()

    def work(number):
        return ptxemu.pretends(), torch.zeros(2, device="cuda").device.type, summed(program, number)

    with torch_without_gpu(), intercepted(emulator), watched(check=True) as report:
        results = in_threads(work, 2)
    assert [each[:2] for each in results] == [(True, "cuda")] * 2
    assert [each.options.check for each in report.launches] == [True, True]
    assert in_threads(lambda _: ptxemu.pretends(), 1) == [False]


def test_what_was_freed_is_told_to_everybody_once():
    live = LiveTensors()
    tensor = torch.zeros(1000)
    start = tensor.data_ptr()
    live.note([tensor])
    freed, here = live.freed_since(0)
    assert not freed
    del tensor
    for _ in range(2):  # two that last searched at the same time
        freed, later = live.freed_since(here)
        assert freed == [(start, start + 4000, True)]
    assert live.freed_since(later) == ([], later)


def test_so_much_was_freed_that_it_may_be_anything(monkeypatch):
    monkeypatch.setattr("ptxemu.host.allocations._MOST_FREED", 4)
    live = LiveTensors()
    for _ in range(6):
        live.note([torch.zeros(100)])
    freed, mark = live.freed_since(0)
    assert freed == [(0, 1 << 47, True)]
    live.note([torch.zeros(100)])
    assert len(live.freed_since(mark)[0]) == 1


def test_options_of_a_thread_are_its_own():
    program = ptxemu.load(SUMS)

    def work(number):
        options = {"policy": "random", "seed": number} if number % 2 else {}
        words = np.arange(64, dtype=np.uint32)
        return launch(program, words, block=(64,), **options).options.policy

    assert in_threads(work) == ["round-robin", "random"] * (THREADS // 2)
    assert Options().policy == "round-robin"
