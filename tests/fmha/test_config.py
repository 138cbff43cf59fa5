"""AttentionConfig refuses what no kernel exists for, by value and limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fmha.config import AttentionConfig


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"head_dim": 80}, NotImplementedError, ("80", "64")),
        ({"dtype": "fp8"}, NotImplementedError, ("fp8", "bf16", "fp16")),
        ({"mask": "window"}, NotImplementedError, ("window", "causal")),
        ({"p_path": "smem"}, NotImplementedError, ("smem", "tmem")),
        ({"tile_m": 64}, NotImplementedError, ("64", "128")),
        ({"kv_stages": 1}, ValueError, ("1", "2")),
        ({"kv_stages": 7}, ValueError, ("7", "6")),
        ({"rescale_log2": 12.0}, ValueError, ("12", "8")),
    ],
)
def test_refusals_name_value_and_limit(change, error, words):
    with pytest.raises(error) as raised:
        replace(AttentionConfig(), **change).check()
    assert all(word in str(raised.value) for word in words)


def test_output_dtype_follows_normalisation():
    assert AttentionConfig(dtype="fp16").out_dtype == "fp16"
    assert AttentionConfig(dtype="fp16", normalize=False).out_dtype == "fp32"


def test_equal_configs_are_one_cache_key():
    assert len({AttentionConfig(), AttentionConfig(kv_stages=3), AttentionConfig(kv_stages=4)}) == 2
