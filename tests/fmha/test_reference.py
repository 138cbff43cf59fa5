"""The reference compared with torch's own attention, and with a sum over single keys."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from fmha import reference
from kernelkit.numerics import aligned_sums, tolerance


def inputs(batch=2, sq=19, skv=33, heads=(4, 2), dtype=torch.bfloat16, dims=(64, 64)):
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (batch, sq, heads[0], dims[0]),
        *((batch, skv, heads[1], columns) for columns in dims),
    )
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def by_torch(q, k, v, visible):
    """Torch's softmax attention in fp64, heads repeated for each group."""
    group = q.shape[2] // k.shape[2]
    heads_first = [t.double().transpose(1, 2) for t in (q, k, v)]
    heads_first[1:] = [t.repeat_interleave(group, dim=1) for t in heads_first[1:]]
    out = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=visible)
    return out.transpose(1, 2)


def by_key(q, k, v, b, h, r, **options):
    """(o, lse, row_max) of one row, summed over its visible keys one by one."""
    n_q, n_k = q.shape[1], k.shape[1]
    n_k = options.get("kv_lens", [n_k] * (b + 1))[b]
    offset = options.get("q_offset", n_k - n_q)
    causal, (left, right) = options.get("causal", False), options.get("window", (None, None))
    end = n_k
    if "q_offset" in options and not causal and right is None:
        end = min(n_k, offset + n_q)
    if causal or right is not None:
        end = min(n_k, offset + r + (0 if causal else right) + 1)
    begin = 0 if left is None else max(0, offset + r - left)
    first_keys = range(min(options.get("sink_tokens", 0), end))
    scale, cap = options.get("scale", q.shape[-1] ** -0.5), options.get("softcap", 0.0)
    weighted = []  # (logit, value row)
    for c in sorted({*range(begin, end), *first_keys}):
        kv_head = h // (q.shape[2] // k.shape[2])
        logit = scale * (q[b, r, h].double() @ k[b, c, kv_head].double()).item()
        weighted.append((cap * math.tanh(logit / cap) if cap else logit, v[b, c, kv_head].double()))
    if "sinks" in options and options["sinks"][h] > -math.inf:
        weighted.append((options["sinks"][h].item(), torch.zeros(v.shape[-1]).double()))
    if not weighted:
        return torch.zeros(v.shape[-1]).double(), -math.inf, -math.inf
    top = max(logit for logit, _ in weighted)
    total = sum(math.exp(logit - top) for logit, _ in weighted)
    raw = sum(math.exp(logit - top) * value for logit, value in weighted)
    o = raw / total if options.get("normalize", True) else raw
    if "rope" in options:
        turn = torch.complex(*(table[offset + r].double() for table in options["rope"])).conj()
        tail = o[-2 * len(turn) :].reshape(-1, 2)
        turned = torch.view_as_real(torch.view_as_complex(tail.contiguous()) * turn)
        o = torch.cat((o[: -2 * len(turn)], turned.flatten()))
    return o, top + math.log(total), top


def tables(positions, rope_dim):
    angles = torch.arange(positions)[:, None] * torch.rand(rope_dim // 2) * 3
    return torch.cos(angles), torch.sin(angles)


SINKS = torch.tensor([0.5, -1.0, 3.0, -math.inf])
OPTIONS = {
    "full": {},
    "scale": {"scale": 0.3},
    "causal": {"causal": True},
    "causal, q_offset": {"causal": True, "q_offset": 2},
    "causal, negative q_offset": {"causal": True, "q_offset": -3},
    "causal, q_offset past the keys": {"causal": True, "q_offset": 11},
    "block": {"q_offset": 5},
    "block past the keys": {"q_offset": 9},
    "left": {"window": (3, None)},
    "right": {"window": (None, 2)},
    "band": {"window": (4, 1)},
    "one key": {"window": (0, 0)},
    "band past the keys": {"window": (2, 3), "q_offset": 12},
    "block and left": {"window": (3, None), "q_offset": 4},
    "sliding": {"causal": True, "window": (2, None)},
    "sink tokens": {"causal": True, "window": (2, None), "sink_tokens": 3},
    "more sink tokens than keys": {"window": (1, 1), "sink_tokens": 30, "q_offset": -2},
    "sinks": {"sinks": SINKS},
    "sinks alone": {"sinks": SINKS, "causal": True, "q_offset": -4},
    "softcap": {"softcap": 2.0, "scale": 1.0},
    "softcap and sinks": {"softcap": 2.0, "sinks": SINKS, "causal": True},
    "raw": {"normalize": False, "causal": True, "q_offset": -1},
    "rope": {"rope": tables(40, 6), "q_offset": 7},
    "rope, raw": {"rope": tables(40, 8), "normalize": False},
    "lengths": {"kv_lens": [7, 0], "causal": True},
    "lengths, sinks": {"kv_lens": [3, 0], "sinks": SINKS, "window": (2, 1)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_key_by_key(options):
    q, k, v = inputs(sq=5, skv=11, heads=(4, 2), dims=(16, 8))
    ours = reference.definition(q, k, v, **options)
    for b in range(2):
        for h in range(4):
            for r in range(5):
                o, lse, row_max = by_key(q, k, v, b, h, r, **options)
                assert torch.allclose(ours.o[b, r, h], o, rtol=0, atol=1e-12), (b, h, r)
                assert ours.lse[b, h, r].item() == pytest.approx(lse, abs=1e-12)
                assert ours.row_max[b, h, r].item() == pytest.approx(row_max, abs=1e-12)


@pytest.mark.parametrize("offset", [-7, -3, 0, 2, 6, 9])
def test_words_of_a_tree_key_by_key(offset):
    tree = torch.tensor([0b11110101, 0b00010, 0b01011, 0, 0b00101])  # of five tokens
    options = reference.Options(q_offset=offset, window=(1, None), sink_tokens=1)
    seen = reference.visible_keys(5, 7, offset, options, tree=tree)
    for row, word in enumerate(tree.tolist()):
        begin = offset + (word & ((1 << row) - 1)).bit_count() - 1
        for key, token in enumerate(range(-offset, 7 - offset)):
            by_tree = token < 0 or (token < 5 and word >> token & 1 == 1)
            assert seen[row, key] == (by_tree and (key >= begin or key < 1)), (row, key)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_rows_may_be_computed_some_at_a_time(options, monkeypatch):
    whole = reference.definition(*inputs(), **options)
    monkeypatch.setitem(reference.AT_ONCE, "cpu", 7 * 4 * 33)  # seven rows and five
    parts = reference.definition(*inputs(), **options)
    for name in ("o", "lse", "row_max"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_definition_is_softmax_attention(causal):
    q, k, v = inputs()
    visible = torch.ones(19, 33, dtype=torch.bool)
    if causal:
        visible = visible.tril(diagonal=33 - 19)
    ours = reference.definition(q, k, v, causal=causal)
    assert torch.allclose(ours.o, by_torch(q, k, v, visible), rtol=0, atol=1e-12)


@pytest.mark.parametrize("attend", [reference.definition, reference.rounded])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (6, 2), "sink_tokens": 3}])
def test_packed_and_paged_layouts_are_the_same_problem(attend, options):
    lens_q, lens_k = (19, 0, 7), (33, 12, 0)
    q, k, v = inputs(batch=3, dims=(32, 16))
    alone = [
        attend(q[b : b + 1, :n_q], k[b : b + 1, :n_k], v[b : b + 1, :n_k], **options)
        for b, (n_q, n_k) in enumerate(zip(lens_q, lens_k, strict=True))
    ]
    expected = torch.cat([one.o[0] for one in alone]), torch.cat([one.lse[0] for one in alone], 1)
    packed_q = torch.cat([q[b, :n] for b, n in enumerate(lens_q)])
    packed_k, packed_v = (torch.cat([t[b, :n] for b, n in enumerate(lens_k)]) for t in (k, v))
    queries = {"cu_seqlens_q": [0, *accumulate(lens_q)]}
    keys = {"cu_seqlens_k": [0, *accumulate(lens_k)]}
    packed = attend(packed_q, packed_k, packed_v, **queries, **keys, **options)
    for entry, length in enumerate(lens_k):
        k[entry, length:] = v[entry, length:] = math.nan
    lengths = {"kv_lens": torch.tensor(lens_k, dtype=torch.int32)}
    clamped = attend(packed_q, k, v, **queries, **lengths, **options)
    pages = {"page_table": torch.tensor([[4, 2, -1], [5, -7, 99], [99, 99, 99]])}
    pools = [torch.full((6, 20, 2, columns), math.nan, dtype=q.dtype) for columns in (32, 16)]
    for pool, dense in zip(pools, (k, v), strict=True):
        pool[4], pool[2, :13], pool[5, :12] = dense[0, :20], dense[0, 20:], dense[1, :12]
    paged = attend(packed_q, *pools, **queries, **lengths, **pages, **options)
    for ours in (packed, clamped, paged):
        assert torch.equal(ours.o, expected[0])
        assert torch.equal(ours.lse, expected[1])


def test_rows_of_no_entry_are_unknown():
    q, k, v = inputs(batch=1)
    ours = reference.rounded(q[0], k[0], v[0], cu_seqlens_q=[2, 10], cu_seqlens_k=[0, 33])
    assert ours.o.shape == (19, 4, 64)
    assert ours.lse.shape == (4, 19)
    assert ours.o.isnan().any((1, 2)).tolist() == [True] * 2 + [False] * 8 + [True] * 9
    assert torch.equal(ours.lse.isnan().any(0), ours.o.isnan().any((1, 2)))


def test_rows_without_keys_are_zero_and_minus_infinity():
    q, k, v = inputs(batch=1, sq=5, skv=3, heads=(1, 1))
    for attend in (reference.definition, reference.rounded):
        ours = attend(q, k, v, causal=True)  # rows 0 and 1 precede every key
        assert not ours.o[0, :2].any()
        assert torch.isneginf(ours.lse[0, 0, :2]).all()
        assert torch.isneginf(ours.row_max[0, 0, :2]).all()
        assert torch.isfinite(ours.lse[0, 0, 2:]).all()


@pytest.mark.parametrize(("sq", "skv"), [(19, 0), (0, 33), (0, 0)])
def test_nothing_to_sum(sq, skv):
    q, k, v = inputs(sq=sq, skv=skv, dims=(64, 32))
    ours = reference.definition(q, k, v)
    assert ours.o.shape == (2, sq, 4, 32)
    assert not ours.o.any()
    assert torch.isneginf(ours.lse).all()
    with_sinks = reference.definition(q, k, v, sinks=torch.full((4,), 2.0))
    assert not with_sinks.o.any()
    assert (with_sinks.lse == (2.0 if skv == 0 else with_sinks.lse)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_points_cost_what_the_dtype_costs(dtype):
    q, k, v = inputs(dtype=dtype)
    exact, rounded = reference.definition(q, k, v), reference.rounded(q, k, v)
    error = (rounded.o.double() - exact.o).abs().max().item()
    epsilon = torch.finfo(dtype).eps
    assert rounded.o.dtype == dtype
    assert 0 < error <= 2 * epsilon * v.double().abs().max().item()
    assert (rounded.lse - exact.lse).abs().max() < 1e-5


def judged(found, exact, rounded):
    """Whether O and LSE of fp16 inputs are within tolerance."""
    o = tolerance.compare_output(found.o, exact.o, rounded.o, torch.float16)
    return o.ok, tolerance.compare_lse(found.lse, exact.lse, rounded.lse).ok


def test_sums_of_a_tensor_core_excuse_no_mistake(monkeypatch):
    q, k, v = inputs(1, 8, 64, (1, 1), torch.float16, (512, 512))
    q, k = 100 * q.abs(), k.abs()  # scores grow with every product, as do truncation errors
    exact = reference.definition(q, k, v)
    right = reference.rounded(q, k, v, aligned_sums=True)
    assert judged(right, exact, right) == (True, True)
    assert judged(right, exact, reference.rounded(q, k, v)) == (True, False)
    limit = tolerance.compare_lse(right.lse, exact.lse, right.lse).limit
    assert judged(replace(right, lse=right.lse - 3 * limit), exact, right) == (True, False)
    short = q.clone()
    short[0, 3, 0, 16:32] = 0.0  # an MMA of one row is left out
    wrong = reference.rounded(short, k, v, aligned_sums=True)
    assert not judged(wrong, exact, right)[1]
    fewer = aligned_sums.SUMS[torch.float16]._replace(bits=22)  # in place of 25
    monkeypatch.setitem(aligned_sums.SUMS, torch.float16, fewer)
    assert not judged(reference.rounded(q, k, v, aligned_sums=True), exact, right)[1]


def test_sums_of_many_weights_are_cut_off_too(monkeypatch):
    q, k, v = inputs(1, 1, 1 << 17, (1, 1), torch.float16, (16, 8))
    options = {"out_dtype": torch.float32}
    v = v.abs()
    exact, near = reference.definition(q, k, v), reference.rounded(q, k, v, **options)
    right = reference.rounded(q, k, v, **options, aligned_sums=True)
    assert judged(right, exact, near) == (False, True)
    assert judged(right, exact, right) == (True, True)
    fewer = aligned_sums.SUMS[torch.float16]._replace(bits=22)
    monkeypatch.setitem(aligned_sums.SUMS, torch.float16, fewer)
    wrong = reference.rounded(q, k, v, **options, aligned_sums=True)
    assert judged(wrong, exact, right) == (False, True)


def test_what_a_sink_far_above_leaves_of_a_row_is_flushed():
    q, k, v = inputs(batch=1, sq=1, skv=1, heads=(2, 1))
    q.fill_(0.0)
    # exp(-75) is normal with any reference maximum; exp(-80) is not with one that lags by 2 ** 15.
    sinks = {"sinks": torch.tensor([75.0, 80.0])}
    exact, rounded = (f(q, k, v, **sinks) for f in (reference.definition, reference.rounded))
    assert exact.o.all()
    assert rounded.o[0, 0].any(dim=-1).tolist() == [True, False]
    assert torch.equal(rounded.lse.flatten(), sinks["sinks"])


def test_output_dtypes():
    q, k, v = inputs(dtype=torch.float16)
    v.fill_(60000.0)

    def dtype_of(**options):
        return reference.rounded(q, k, v, **options).o.dtype

    assert dtype_of() == torch.float16
    assert dtype_of(out_dtype=torch.float32) == torch.float32
    assert dtype_of(normalize=False) == torch.float32
    assert dtype_of(normalize=False, out_dtype=torch.bfloat16) == torch.bfloat16
    sums = reference.rounded(q, k, v, normalize=False, out_dtype=torch.float16).o
    assert torch.isposinf(sums).any()  # because of this range raw O is fp32 by default
