"""Plans and repeated steps specific to decode; tests/kernelkit tests what all families share."""

from __future__ import annotations

import ctypes

import pytest
import torch

from gqa_lowlatency import choose, decode, decode_plan, launch
from gqa_lowlatency.launch import DECODE
from kernelkit.call.front import forget
from kernelkit.call.launch import Target
from tests.kernelkit.recorded import Gpu, Recorded
from tests.kernelkit.test_tape import held_by
from tests.support.attentions import BF16, problem, same

E4M3, ARCH = torch.float8_e4m3fn, {"arch": "sm_90a"}


@pytest.fixture
def launched(monkeypatch):
    """Launches on a simulated GPU of compute capability 9.0: one kernel for each call that takes no
    shortcut.

    kinds: addresses of tensors and tables, numbers, the stream.
    """
    made, word, compile_once = [], ctypes.c_uint64, launch.compile_once
    numbers = [*[ctypes.c_float] * 2, *[ctypes.c_int32] * 3]

    def record(config, arch, source):
        tables = config.lens + config.sinks + config.k_scale + config.v_scale + 2 * config.parts
        kinds = [*[word] * (5 + tables), *numbers, word]
        made.append(Recorded(compile_once(config, arch, source), kinds))
        return made[-1]

    monkeypatch.setattr(launch, "choose_target", lambda *_: Target("cuda", "sm_90a"))
    monkeypatch.setattr(choose, "clusters_at_once", lambda device, width: 132 // width)
    monkeypatch.setattr(launch, "compile_once", record)
    Gpu(monkeypatch)
    return made


def test_addresses_are_those_of_the_call(launched):
    inputs, sinks = problem("dense")[0], torch.zeros(4)
    plan = decode_plan(*inputs, sinks=sinks, window=5, softcap=2.0)
    (compiled,) = launched
    others = [tensor.clone() for tensor in inputs]
    out, lse = plan(*inputs)
    for step in (inputs, others, others, inputs):
        plan(*step, out=out, lse=lse)
        moving = [tensor.data_ptr() for tensor in (*step, out, lse, sinks)]
        assert compiled.calls[-1][:6] == moving
        assert compiled.calls[-1][8:] == [5, 0, 1, 0]
    assert len(compiled.calls) == 5


def test_workspace_belongs_to_the_plan(launched):
    """Several clusters of a KV head store their sums in it; a call does not allocate it."""
    inputs, _ = problem("dense")
    plan = decode_plan(*inputs, parts=2)
    partial, counts = sorted(held_by(plan._tape), key=lambda tensor: tensor.dtype == torch.int32)
    for _ in range(3):
        plan(*inputs)
    (compiled,) = launched
    assert {tuple(call[5:7]) for call in compiled.calls} == {
        (partial.data_ptr(), counts.data_ptr())
    }
    assert counts.dtype == torch.int32
    assert not counts.any()


@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_scales_are_read_at_each_call(shape):
    """A single number is included, of which the kernel reads a copy for each head."""
    inputs, scale = problem("dense", kv_dtype=E4M3)[0], torch.full(shape, 0.5)
    plan = decode_plan(*inputs, k_scale=scale, v_scale=2.0, **ARCH)
    for value in (0.5, 3.0):
        scale.fill_(value)
        expected = decode(*inputs, k_scale=value, v_scale=2.0, return_lse=True, **ARCH)
        assert same(plan(*inputs), expected), value


def test_a_broadcast_is_copied_at_each_call():
    """The DSL would take its strides of 0 for constants of the kernel."""
    (q, k, v), tables = problem("pages")
    table = tables["page_table"][:1].clone()
    tables["page_table"] = table.expand(2, 3)
    plan = decode_plan(q, k, v, **tables, **ARCH)
    for pages in ([3, 1, 0], [4, 0, 2]):
        table.copy_(torch.tensor([pages]))
        plain = tables | {"page_table": tables["page_table"].contiguous()}
        expected = decode(q, k, v, **plain, return_lse=True, **ARCH)
        assert same(plan(q, k, v, **tables), expected)
        assert same(decode(q, k, v, **tables, return_lse=True, **ARCH), expected)


def test_repeated_steps_have_nothing_of_an_earlier_one():
    """A repeated step reuses neither addresses nor contents of earlier scales, sinks and
    lengths."""
    (q, k, v), _ = problem("lens", kv_dtype=E4M3)
    names = [leaf.name for leaf in DECODE.schema.tensors if leaf.name != "out"]
    forget()
    for number in (1.0, 3.0, 0.5):
        given = {
            "kv_lens": torch.tensor([40 - int(number), 9]).int(),
            "sinks": torch.full((4,), number, dtype=BF16),
            "k_scale": torch.tensor([number]),
            "v_scale": torch.tensor([number, 2.0]),
        }
        tensors = {"q": q, "k": k, "v": v, **given}
        for change in (0.0, 1.0):
            for name in ("sinks", "k_scale"):  # the kernel reads copies of these
                given[name].fill_(number + change)
            found = DECODE.recall(names, [tensors.get(name) for name in names], ARCH)
            assert same(found, decode(q, k, v, return_lse=True, **given, **ARCH)), number
    assert len(DECODE.tapes.known) == 1
    forget()


def test_scales_may_lie_anywhere():
    inputs, _ = problem("dense", kv_dtype=E4M3)
    scales = torch.tensor([[0.5, 9.0], [2.0, 9.0]])[:, 0]
    results = [
        decode(*inputs, k_scale=scale, v_scale=scale, **ARCH)
        for scale in (scales, scales.contiguous(), scales.flip(0), None)
    ]
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert not torch.equal(results[0], results[3])
