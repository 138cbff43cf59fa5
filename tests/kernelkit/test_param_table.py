"""Parameters packed by name on the host and read by name on the device."""

from dataclasses import dataclass

import pytest
import torch

from kernelkit.device.device_table import DeviceTable
from kernelkit.device.param_table import ParamTable, Word, word_names


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A matrix, given by its address."""

    address: Word
    stride: Word


@dataclass(frozen=True, kw_only=True)
class OneParams:
    """Parameters of a kernel with one matrix."""

    count: Word
    first: Matrix


@dataclass(frozen=True, kw_only=True)
class TwoParams(OneParams):
    """Parameters of a kernel with two matrices."""

    second: Matrix


def test_words_have_the_order_of_the_fields_whatever_the_order_of_arguments():
    names = "count", "first.address", "first.stride", "second.address", "second.stride"
    assert word_names(TwoParams) == names
    params = TwoParams(
        second=Matrix(stride=5, address=4), first=Matrix(address=2, stride=3), count=1
    )
    assert ParamTable.of(params).numbers == [1, 2, 3, 4, 5]
    assert ParamTable.zeros(OneParams).numbers == [0, 0, 0]


def test_a_tensor_is_its_address():
    x = torch.zeros(4)
    table = ParamTable.of(OneParams(count=1, first=Matrix(address=(x, 8), stride=2)))
    assert table.numbers == [1, x.data_ptr() + 8, 2]
    assert table.addresses == [(1, x, 8)]


def test_the_device_reads_what_the_host_packed(monkeypatch):
    params = TwoParams(
        count=1, first=Matrix(address=2, stride=3), second=Matrix(address=4, stride=5)
    )
    numbers = ParamTable.of(params).numbers
    words = {(0, place): number for place, number in enumerate(numbers)}
    monkeypatch.setattr(DeviceTable, "read", lambda table: words)
    assert DeviceTable(None, (1, len(numbers))).unpack(TwoParams) == params
    with pytest.raises(TypeError, match=r"OneParams has 3 words, the table has shape \(1, 5\)"):
        DeviceTable(None, (1, len(numbers))).unpack(OneParams)
