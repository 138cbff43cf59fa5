"""GGUF files written by the package gguf: both layouts have its numbers, and errors are named."""

from __future__ import annotations

import sys

import gguf
import numpy as np
import pytest
import torch

from lab.problems.grouped_gemm import checked
from q8_0 import GgufFile, dequantise, matvec, reference, repack
from q8_0.blocks import BLOCK, INTERLEAVED, LAYOUTS, SOA
from q8_0.module import Q8Linear
from tests.support.hostile.calls import refused

ROWS, COLS = 6, 160
Q8_0 = gguf.GGMLQuantizationType.Q8_0


@pytest.fixture(scope="module")
def numbers():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(ROWS, COLS, generator=generator) * 0.3


@pytest.fixture(scope="module")
def path(numbers, tmp_path_factory):
    """A file with a matrix in Q8_0, one in Q4_0, a tensor of three dimensions and plain numbers."""
    found = tmp_path_factory.mktemp("gguf") / "some.gguf"
    writer = gguf.GGUFWriter(found, "llama")
    blocks = gguf.quantize(numbers.numpy(), Q8_0)
    writer.add_tensor("w", blocks, raw_dtype=Q8_0)
    kind = gguf.GGMLQuantizationType.Q4_0
    writer.add_tensor("small", gguf.quantize(numbers.numpy(), kind), raw_dtype=kind)
    writer.add_tensor("cube", np.stack([blocks, blocks]), raw_dtype=Q8_0)
    writer.add_tensor("bias", np.arange(ROWS, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def test_both_layouts_have_the_numbers_of_the_package(path, numbers):
    file = GgufFile(path)
    assert file.names == ("w", "small", "cube", "bias")
    expected = torch.from_numpy(gguf.dequantize(gguf.quantize(numbers.numpy(), Q8_0), Q8_0))
    for layout in LAYOUTS:
        weights = file.weights("w", layout=layout)
        assert (weights.rows, weights.cols, weights.layout) == (ROWS, COLS, layout)
        with checked():
            assert torch.equal(dequantise(weights, torch.float32), expected)


def test_the_reference_rounds_as_the_package_does(path, numbers):
    weights = GgufFile(path).weights("w")
    assert torch.equal(reference.rounded(numbers, INTERLEAVED).data, weights.data)


def test_its_error_is_that_of_the_format(path, numbers):
    """The error is half a step of each block, plus the rounding of the scale to fp16."""
    found = dequantise(GgufFile(path).weights("w", layout=SOA), torch.float32)
    steps = (numbers.view(ROWS, -1, BLOCK).abs().amax(-1) / 127).repeat_interleave(BLOCK, 1)
    error = (found - numbers).abs() / steps
    assert error.max() <= 0.5 + 127 * 2.0**-11
    assert error.max() > 0.4


def test_the_file_is_mapped_and_not_written_to(path):
    before = path.read_bytes()
    weights = GgufFile(path).weights("w")
    assert weights.data.data_ptr() % 32 == 0
    weights.data.zero_()
    assert path.read_bytes() == before


def test_a_layer_out_of_a_file(path, numbers):
    layer = Q8Linear.from_gguf(GgufFile(path), "w", "bias", dtype=torch.float32, device="cpu")
    x = torch.randn(2, COLS)
    exact = reference.matvec(layer.weights, x, layer.bias)
    assert (layer(x).double() - exact).abs().max() < 1e-4
    assert torch.equal(layer(x), matvec(repack(layer.weights, INTERLEAVED), x, layer.bias))


def _put(data: bytes, at: bytes, behind: int, value: bytes) -> bytes:
    """Replace bytes, `behind` bytes after the first occurrence of `at`."""
    place = data.index(at) + len(at) + behind
    return data[:place] + value + data[place + len(value) :]


HUGE = b"\xff" * 7 + b"\x7f"


@pytest.mark.parametrize(("change", "words"), [
    (lambda d: d[:-9], "tensor 'bias' at byte .* takes 24 bytes, 23 are left"),
    (lambda d: d[:40], "are left"),
    (lambda d: b"", "it is empty"),
    (lambda d: _put(d, b"GGUF", 0, b"\7"), r"version 7, expected one of \(2, 3\)"),
    (lambda d: _put(d, b"GGUF", 4, HUGE), "tensor '' has"),  # number of tensors
    (lambda d: _put(d, b"GGUF", 12, HUGE), "the key of value 2 has"),  # number of values
    (lambda d: _put(d, b"general.architecture", 4, HUGE), "takes 9223372036854775807 bytes"),
    (lambda d: _put(d, b"general.architecture", 0, b"\x0f"), "has type 15"),
    (lambda d: _put(d, b"bias", 0, b"\x09"), "'bias' has 9 dimensions, at most 4"),
    (lambda d: _put(d, b"bias", 4, HUGE), "'bias' at byte .* takes"),
    (lambda d: _put(d, b"bias", 4, bytes(8)), "at least 1 each"),
    (lambda d: _put(d, b"bias", 12, b"\x63"), "'bias' has unknown format 99"),
    (lambda d: _put(d, b"bias", 16, b"\x01"), "offset .* not a multiple of 32"),
    (lambda d: _put(d, b"bias", 16, b"\0" * 7 + b"\x40"), "'bias' at byte .* takes 24"),
    (lambda d: d.replace(b"small", b"w\xff\xfe\xff\xff"), "not UTF-8"),
])  # fmt: skip
def test_a_damaged_file_names_the_field(path, tmp_path, change, words):
    other = tmp_path / "other.gguf"
    other.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=f"other.gguf is not a GGUF file: .*{words}"):
        GgufFile(other)


def test_what_is_refused(path, tmp_path, monkeypatch):
    file = GgufFile(path)
    refused(lambda: file.weights("small"), "small is in Q4_0: only Q8_0")
    refused(lambda: file.weights("bias"), "bias is in F32: only Q8_0")
    refused(lambda: file.weights("cube"), r"cube has dimensions \[160, 6, 2\]")
    refused(lambda: file.weights("w", layout="rows"), "layout 'rows'")
    refused(lambda: file.weights(3), "name is 3")
    refused(lambda: file.numbers("w"), "w is in Q8_0, expected one of F32, F16")
    refused(lambda: GgufFile(3), "path is 3")
    for kind in (KeyError, ValueError):
        with pytest.raises(kind, match="no tensor 'v', it has 4 others"):
            file.weights("v")
    with pytest.raises(FileNotFoundError, match="no such file"):
        GgufFile(tmp_path / "none.gguf")
    other = tmp_path / "other.gguf"
    other.write_bytes(b"not a file of that kind" * 10)
    refused(lambda: GgufFile(other), "other.gguf is not a GGUF file")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match="pip install gguf"):
        GgufFile(path)
