"""Names of kernels in profilers, and ranges around operators."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from kernelkit.call import ranges
from kernelkit.compile.compiler import compile_once
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.names import LONGEST, kernel_name, stem_of


@dataclass(frozen=True)
class Inner:
    label: ClassVar = ("inner", "hidden")
    top_k: int = 4
    n_group: int = 1
    hidden: int = 64


@dataclass(frozen=True)
class Config:
    dtype: str
    head_dim: int = 64
    out_dtype: str = ""
    causal: bool = False
    whole: bool = True
    shape: tuple[int, int] = (1, 1)
    factor: float = 1.0
    limit: int | None = None
    inner: Inner = Inner()


@dataclass(frozen=True)
class Labelled(Config):
    label: ClassVar = ("decode", "head_dim", "dtype")


@pytest.mark.parametrize(("source", "config", "arch", "name"), [
    ("moe.routing.topk_kernel", Config("bf16"), "sm_90a", "moe_routing_topk_sm90_bf16"),
    ("a.sm90.kernel", Config("bf16", 64, "fp32", True, False), "sm_100a",
     "a_sm100_bf16_out_fp32_causal"),
    ("a.b_kernel:host_function_of_count", Config("", shape=(2, 3)), "sm_89",
     "a_b_count_sm89_shape_2_3"),
    ("a.b", Config("q", factor=0.5, limit=7), "sm_120a", "a_b_sm120_q_factor0_5_limit7"),
    ("a.b", Labelled("q", causal=True), "sm_90a", "decode_sm90_d64_q_causal"),
    ("a.b", Config("q", inner=Inner(8, 1)), "sm_90a", "a_b_sm90_q_h64_k8"),
    ("a.b", Config("q", inner=Inner(8, 2)), "sm_90a", "a_b_sm90_q_h64_k8_n_group2"),
])  # fmt: skip
def test_a_name_says_what_differs_from_the_default(source, config, arch, name):
    assert kernel_name(KernelKey(source, config, arch)) == f"{name}_cutlass"
    assert stem_of(f"{name}_cutlass_0") == name.partition("_sm")[0] == stem_of(f"{name}_0")


def test_a_long_name_ends_with_a_word():
    name = kernel_name(KernelKey("a.b", Config("x" * 80, out_dtype="y" * 30), "sm_90a"))
    assert name == f"a_b_sm90_{'x' * 80}_cutlass"
    assert len(name.removesuffix("_cutlass")) < LONGEST


@pytest.mark.parametrize("name", ["void gemm<16>", "nvjet_sm90", "_sm90_a", "moe_smooth_kernel"])
def test_a_kernel_of_others_has_no_stem(name):
    assert stem_of(name) in (None, "nvjet")


def test_ptx_and_host_code_have_the_name():
    """The next compilation of the same class has another name. Both include ptxas' option for the
    measured code."""
    from moe.routing.config import CombineConfig

    for top_k in (2, 3):
        config = CombineConfig(top_k, "bf16", "bf16", True)
        made = compile_once(config, "sm_90a", "moe.routing.combine_kernel")
        wanted = f"moe_combine_sm90_k{top_k}_bf16_out_bf16_weighted"
        assert re.findall(r"\.entry (\w+)", made.ptx) == [f"{wanted}_cutlass_0"]
        assert made.name == f"{wanted}_cutlass"


def test_a_config_may_go_without_the_word():
    from q8_0.choose import matvec_config

    config = matvec_config("soa", "bf16", "bf16", sizes=(1, 64, 1024), bias=False, sms=132)
    made = compile_once(config, "sm_90a", "q8_0.matvec_kernel")
    assert re.findall(r"\.entry (\w+)", made.ptx) == [f"{made.name}_0"]
    assert "cutlass" not in made.name


# --- ranges


@pytest.fixture
def seen(monkeypatch):
    """Names of the ranges that begin, as on a GPU with ranges enabled."""
    names: list[str] = []

    @contextmanager
    def noted(name):
        names.append(name)
        yield

    monkeypatch.setattr(ranges, "ON", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range", noted)
    return names


def test_a_function_is_in_a_range_where_ranges_are_on(seen, monkeypatch):
    class Named:
        name = "of the object"

        def call(self, x):
            return x + 1

    assert ranges.ranged(lambda x: x + 1, "outer")(1) == 2
    assert ranges.ranged(Named.call)(Named(), 2) == 3
    with ranges.nvtx_range("layer 3"):
        pass
    assert seen == ["outer", "of the object", "layer 3"]
    monkeypatch.setattr(ranges, "ON", False)
    assert ranges.ranged(Named.call) is Named.call
    with ranges.nvtx_range("layer 4"):
        pass
    assert len(seen) == 3


def test_without_a_gpu_there_are_no_ranges(seen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ranges.ranged(lambda: 1, "outer")() == 1
    assert not seen


SCRIPT = """
import torch
from kernelkit import ranges
from kernelkit.call.operator import Operator
import moe
assert ranges.ON is (%r != "0")
print(hasattr(Operator.__call__, "__wrapped__"), moe.fused_moe.__code__.co_name)
"""


@pytest.mark.parametrize(("value", "words"), [("1", "True inside"), ("0", "False call")])
def test_the_switch_is_read_when_packages_are_imported(value, words, monkeypatch):
    monkeypatch.setenv(ranges.VARIABLE, value)
    command = [sys.executable, "-c", SCRIPT % value]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == words
