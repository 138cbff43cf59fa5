"""Other people's kernels, if they are installed: each warp's path is found, and a time results.

`docs/cycle_model.md` lists those that were tried; here is one of each kind that a line or two of
Python launches.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from cycle_model.gpus import for_arch
from cycle_model.grid import LaunchModel
from cycle_model.launch import bind
from cycle_model.sass.tools import HOW_TO_GET_TOOLS, tools_found
from lab.cycles.peers import SaysCuda, frost
from ptxemu.host.emulator import Emulator
from ptxemu.host.gpu_machine import machine_with_gpu
from ptxemu.watch import watched

ROWS, COLUMNS, TOKENS = 32, 4096, 256


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def flash(head_dim: int, backward: bool = False) -> None:
    attention = importlib.import_module("flash_attn.cute").flash_attn_func
    q, k, v = (drawn(1, TOKENS, 1, head_dim).requires_grad_(backward) for _ in range(3))
    out = attention(q, k, v, causal=True)
    out = out[0] if isinstance(out, tuple) else out
    if backward:
        out.backward(torch.randn_like(out))


def quack_norm() -> None:
    importlib.import_module("quack.rmsnorm").rmsnorm_fwd(drawn(ROWS, COLUMNS), torch.ones(COLUMNS))


def quack_softmax() -> None:
    importlib.import_module("quack.softmax").softmax_fwd(drawn(ROWS, COLUMNS))


def quack_gemm() -> None:
    multiplied = importlib.import_module("quack.gemm_interface").gemm
    multiplied(drawn(TOKENS, TOKENS), drawn(TOKENS, TOKENS), tuned=False)


def flashinfer_norm() -> None:
    quantised = importlib.import_module("flashinfer.cute_dsl").rmsnorm_fp4quant
    weight, scale = torch.ones(COLUMNS).bfloat16(), torch.ones(1)
    quantised(drawn(ROWS, COLUMNS), weight, global_scale=scale)


def flashinfer_prefill() -> None:
    wrappers = importlib.import_module("flashinfer.cute_dsl.attention.wrappers.batch_prefill")
    with SaysCuda():
        run = wrappers.BatchPrefillCuteDSLWrapper(torch.empty(1 << 20, dtype=torch.uint8))
        starts = torch.tensor([0, TOKENS], dtype=torch.int32)
        heads = {"num_qo_heads": 2, "num_kv_heads": 1, "head_dim_qk": 128}
        kinds = dict.fromkeys(("q_data_type", "kv_data_type"), torch.bfloat16)
        run.plan(starts, starts, causal=True, **heads, **kinds)
        run.run(drawn(TOKENS, 2, 128), drawn(TOKENS, 1, 128), drawn(TOKENS, 1, 128))


def flashinfer_decode() -> None:
    wrappers = importlib.import_module("flashinfer.cute_dsl.attention.wrappers.batch_decode")
    with SaysCuda():
        run = wrappers.BatchDecodeCuteDSLWrapper(torch.empty(1 << 24, dtype=torch.uint8))
        kinds = dict.fromkeys(("q_data_type", "kv_data_type", "o_data_type"), torch.bfloat16)
        run.plan(1, TOKENS, 8, 1, 128, kv_splits=2, reduction="kernel", **kinds)
        run.run(drawn(1, 1, 8, 128), drawn(1, TOKENS, 1, 128), drawn(1, TOKENS, 1, 128))


def frost_attention() -> None:
    q, k, v = (drawn(1, TOKENS, heads, 128).transpose(1, 2) for heads in (2, 1, 1))
    with frost() as attention:
        attention(q, k, v, is_causal=True)


CALLS: dict[str, Callable[[], None]] = {
    **{f"FA4 forward {d}": lambda d=d: flash(d) for d in (64, 128, 256)},
    **{f"FA4 backward {d}": lambda d=d: flash(d, backward=True) for d in (64, 128)},
    "QuACK rmsnorm": quack_norm,
    "QuACK softmax": quack_softmax,
    "QuACK gemm": quack_gemm,
    "FlashInfer rmsnorm to FP4": flashinfer_norm,
    "FlashInfer prefill": flashinfer_prefill,
    "FlashInfer decode": flashinfer_decode,
    "FROST attention": frost_attention,
}  # fmt: skip


@contextmanager
def recorded() -> Iterator[list[Any]]:
    """Collect the launches within the block that have machine code."""
    found: list[Any] = []
    with machine_with_gpu(Emulator()), watched(record=True, limit=None) as report:
        yield found
    found += [each.recording for each in report.launches if each.recording.cubin]


@pytest.mark.parametrize("name", CALLS)
def test_every_warp_has_a_path(name: str) -> None:
    if not tools_found():
        pytest.skip(HOW_TO_GET_TOOLS)
    with recorded() as recordings:
        try:
            CALLS[name]()
        except ImportError as missing:
            pytest.skip(f"{name.partition(' ')[0]} is not installed ({missing})")
    assert recordings
    for recording in recordings:
        bound = bind(recording)
        warps = [warp for number in bound.clusters for warp in bound.cluster(number)]
        assert len(warps) == len(recording.warps)
        assert LaunchModel(bound, for_arch(recording.arch)).predict().cycles > 0
