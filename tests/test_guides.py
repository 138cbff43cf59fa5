"""The guides for users of other libraries are true: converted calls give the original results.

A guide shows a call as ```text and, after it, the converted call as ```python. The latter makes all
tensors. Both are executed here, the former with the definitions in `tests.support.originals`.
"""

from __future__ import annotations

import math
import re
import sys

import pytest
import torch

import fmha
import gqa_lowlatency
from kvcache import page_table
from lab.house.source import ROOT
from tests.support import originals

PAIR = re.compile(r"^```text\n(.*?)^```$\n.*?^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = sorted((ROOT / "docs").glob("from_*.md"))
CALLS = {
    f"{page.stem}-{number}": pair
    for page in PAGES
    for number, pair in enumerate(PAIR.findall(page.read_text(encoding="utf-8")))
}
INT = torch.int32


@pytest.fixture
def libraries(monkeypatch):
    """Install modules of the other libraries that hold our definitions."""
    for name, module in originals.MODULES.items():
        for end in [match.start() for match in re.finditer(r"\.", name)]:
            monkeypatch.setitem(sys.modules, name[:end], type(module)(name[:end]))
        monkeypatch.setitem(sys.modules, name, module)


def close(found, wanted):
    """Return whether the error fits 16-bit results, or e4m3 weights with three mantissa bits."""
    assert found.shape == wanted.shape
    found, wanted = found.double(), wanted.double()
    empty = wanted.isinf()  # of rows without keys
    assert torch.equal(found.isinf(), empty)
    assert torch.equal(found[empty], wanted[empty])
    found, wanted = (x.masked_fill(empty, 0) for x in (found, wanted))
    return (found - wanted).norm() <= 0.03 * wanted.norm()


@pytest.mark.parametrize("name", CALLS)
def test_a_converted_call_gives_what_the_call_gave(name, libraries):
    theirs, ours = CALLS[name]
    torch.manual_seed(0)
    names: dict = {"workspace": None}
    exec(ours, names)
    here = {key: x for key, x in names.items() if isinstance(x, torch.Tensor)}
    given = {key: x.clone() for key, x in here.items() if key not in ("out", "lse")}
    there = names | given
    exec(theirs, there)
    computed = {key for key, x in here.items() if there[key] is not given.get(key, x)}
    assert computed >= here.keys() & {"out", "lse"} or computed == {"kv_lens"}
    for key, x in here.items():  # both calls write the same to the caches
        assert close(x, there[key]) if key in computed else torch.equal(x, there[key]), key


def test_every_call_of_a_guide_is_paired():
    assert [page.stem for page in PAGES] == [
        "from_flash_attention", "from_flashinfer", "from_flashmla", "from_vllm_experts"
    ]  # fmt: skip
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        pairs = sum(name.startswith(f"{page.stem}-") for name in CALLS)
        assert pairs == text.count("\n```python\n") == text.count("\n```text\n") > 0


# ---- statements of the guides in words


def bf16(*shape):
    return torch.randn(*shape).bfloat16()


@pytest.mark.parametrize("window", [(-1, -1), (5, -1), (5, 0), (3, 4), (-1, 2), (0, 0)])
@pytest.mark.parametrize(("queries", "keys"), [(7, 40), (40, 7), (33, 33)])
def test_windows_and_the_alignment_are_those_of_flash_attention(window, queries, keys):
    torch.manual_seed(1)
    q, k, v = bf16(1, queries, 4, 64), bf16(1, keys, 2, 64), bf16(1, keys, 2, 64)
    found = fmha.attention(q, k, v, window=window, return_lse=True)
    wanted = originals.flash_attn_func(q, k, v, window_size=window, return_attn_probs=True)
    assert all(map(close, found, wanted[:2]))


def test_causal_is_that_of_flash_attention_where_there_are_fewer_keys():
    q, k, v = bf16(2, 9, 4, 64), bf16(2, 5, 2, 64), bf16(2, 5, 2, 64)
    found = fmha.attention(q, k, v, causal=True, return_lse=True)
    wanted = originals.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert all(map(close, found, wanted[:2]))
    assert not found[0][:, :4].any()


def test_single_calls_of_flashinfer_and_a_cache_without_pages():
    q, k, v = bf16(8, 64), bf16(50, 2, 64), bf16(50, 2, 64)
    found = gqa_lowlatency.decode(q[None], k[None], v[None])
    wanted = originals.flash_attn_with_kvcache(
        q[None, None], k[None], v[None], cache_seqlens=torch.tensor([50])
    )
    assert close(found, wanted[:, 0])


def test_rows_that_are_not_used_keep_the_place_of_the_others():
    """The last used row is aligned with the last key, as by `seqused_q` of FlashAttention 3."""
    q, k, v = bf16(2, 9, 4, 64), bf16(2, 30, 2, 64), bf16(2, 30, 2, 64)
    kv_lens, used = torch.tensor([30, 12], dtype=INT), torch.tensor([9, 4], dtype=INT)
    found = fmha.attention(q, k, v, causal=True, kv_lens=kv_lens, q_offset=kv_lens - used)
    for entry, (keys, rows) in enumerate(zip(kv_lens.tolist(), used.tolist(), strict=True)):
        entries = q[entry, :rows], k[entry, :keys], v[entry, :keys]
        wanted = originals.flash_attn_func(*(x[None] for x in entries), causal=True)
        assert close(found[entry, :rows], wanted[0])


def test_padding_on_the_left_is_not_seen():
    """The keys before `first_keys` are not seen, as by `cache_leftpad` of FlashAttention."""
    q, k, v = bf16(2, 8, 64), bf16(2, 40, 2, 64), bf16(2, 40, 2, 64)
    kv_lens, first = torch.tensor([40, 17], dtype=INT), torch.tensor([3, 16], dtype=INT)
    found = gqa_lowlatency.decode(q, k, v, kv_lens=kv_lens, first_keys=first)
    for entry, (end, begin) in enumerate(zip(kv_lens.tolist(), first.tolist(), strict=True)):
        keys = (x[None, entry, begin:end] for x in (k, v))
        wanted = originals.flash_attn_func(q[None, None, entry], *keys)
        assert close(found[entry], wanted[0, 0])


def test_parts_of_flash_attention_are_merged_as_a_stack():
    """The result is that of `flash_attn_combine`, whose LSE is [parts, B, S, H]."""
    q, k, v = bf16(1, 5, 4, 64), bf16(1, 24, 2, 64), bf16(1, 24, 2, 64)
    parts = [
        originals.flash_attn_func(q, k[:, part::3], v[:, part::3], return_attn_probs=True)
        for part in range(3)
    ]
    out, lse = (torch.stack([part[n] for part in parts]).float() for n in (0, 1))
    lse = lse.transpose(-2, -1).contiguous()
    found = fmha.merge((out, lse.transpose(-2, -1)))
    wanted = originals.flash_attn_func(q, k, v, return_attn_probs=True)
    assert all(map(close, found, wanted[:2]))


def test_states_of_flashinfer_are_merged_as_a_stack():
    v, s = bf16(5, 3, 4, 64), torch.randn(5, 3, 4)
    out, lse = fmha.merge((v.transpose(0, 1), s.permute(1, 2, 0) * math.log(2)))
    wanted, total = originals.merge_states(v, s)
    assert close(out, wanted)
    assert close(lse.T / math.log(2), total)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("together", [True, False])
def test_layouts_of_flashinfer_are_views(layout, together):
    torch.manual_seed(2)
    indptr, indices = torch.tensor([0, 1, 1, 4], dtype=INT), torch.tensor([5, 2, 0, 3], dtype=INT)
    lists = indptr, indices, torch.tensor([8, 0, 1], dtype=INT)
    rows = (8, 2) if layout == "NHD" else (2, 8)
    whole = bf16(6, 2, *rows, 64)
    cache = whole if together else tuple(x.contiguous() for x in whole.unbind(1))
    if together:
        k, v = (cache if layout == "NHD" else cache.transpose(2, 3)).unbind(1)
    else:
        k, v = cache if layout == "NHD" else (x.transpose(1, 2) for x in cache)
    q, (table, kv_lens) = bf16(3, 8, 64), page_table(*lists, 8, max_pages=4)
    found = gqa_lowlatency.decode(q, k, v, page_table=table, kv_lens=kv_lens, return_lse=True)
    wrapper = originals.BatchDecodeWithPagedKVCacheWrapper(None, layout)
    wrapper.plan(*lists, 8, 2, 64, 8, q_data_type=torch.bfloat16)
    out, lse = wrapper.run(q, cache, return_lse=True)
    assert close(found[0], out)
    assert close(found[1] / math.log(2), lse)
