"""What stands in for SGLang's extension, without SGLang: links of trees of drafts, slots."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from lab.engines import sglang_operators as operators


def links(rows: int, number: int) -> tuple[torch.Tensor, ...]:
    """Positions, index, first child and next sibling, to be written."""
    return (
        torch.zeros(rows * number, dtype=torch.int64),
        *(torch.full((rows, number), -7) for _ in range(3)),
    )


def test_links_of_a_tree():
    tree = torch.zeros(1, 5, 5, dtype=torch.bool)
    for draft, seen in enumerate([[0], [0, 1], [0, 1, 2], [0, 3], [0, 4]]):
        tree[0, draft, seen] = True
    positions, index, child, sibling = links(1, 5)
    operators.reconstruct_indices_from_tree_mask(
        tree.flatten(), torch.tensor([20]), positions, index, child, sibling, 1, 5
    )
    assert positions.tolist() == [20, 21, 22, 21, 21]
    assert index.tolist() == [[0, 1, 2, 3, 4]]
    assert child.tolist() == [[1, 2, -1, -1, -1]]
    assert sibling.tolist() == [[-1, 3, -1, 4, -1]]
    drafts, best = torch.tensor([[9, 5, 6, 7, 8]]), torch.tensor([[7, 0, 0, 4, 0]])
    accepted, count = torch.full((1, 5), -1), torch.zeros(1, dtype=torch.int32)
    predicted = torch.zeros(5, dtype=torch.int32)
    operators.verify_tree_greedy_cpu(
        predicted, accepted, count, drafts, index, child, sibling, best
    )
    assert (accepted.tolist(), count.tolist()) == ([[0, 3, -1, -1, -1]], [1])
    assert predicted.tolist() == [7, 0, 0, 4, 0]


@pytest.mark.parametrize("mode", [0, 1])
def test_a_chain_is_a_tree(mode):
    positions, index, child, sibling = links(2, 3)
    before = [4, 2] if mode == 0 else [0, 0]
    mask = torch.zeros(sum(3 * (n + 3) for n in before), dtype=torch.bool)
    given = (torch.tensor([4, 2]), mask, positions, index, child, sibling)
    operators.build_tree_kernel_efficient_cpu(mask, mask, *given, 1, 2, 3, mode)
    assert positions.tolist() == [4, 5, 6, 2, 3, 4]
    assert child.tolist() == [[1, 2, -1]] * 2
    first = mask[: 3 * (before[0] + 3)].view(3, -1)
    assert torch.equal(first, torch.ones_like(first).tril(before[0]))
    with pytest.raises(NotImplementedError, match="2 branches"):
        operators.build_tree_kernel_efficient_cpu(mask, mask, *given, 2, 2, 3, mode)


def test_slots():
    table = torch.arange(20).view(2, 10)
    rows, begin, end = torch.tensor([1, 0]), torch.tensor([2, 0]), torch.tensor([4, 1])
    slots = torch.zeros(5, dtype=torch.int64)
    operators.assign_extend_cache_locs_cpu(rows, table, begin, end, slots, 10)
    assert slots.tolist() == [12, 13, 0, 0, 0]
    operators.assign_req_to_token_pool_cpu(rows, table, begin, end, torch.tensor([7, 8, 9]), 10)
    assert (table[1, 2:4].tolist(), table[0, 0].tolist()) == ([7, 8], 9)
    operators.assign_draft_cache_locs_contiguous_cpu(rows, table, begin, slots, 10, 1, 2)
    assert slots[:4].tolist() == [7, 8, 9, 1]
    out = torch.zeros(3, dtype=torch.int64)
    operators.fill_accept_out_cache_loc_cpu(torch.tensor([[2, -1], [0, -1]]), slots, out)
    assert out.tolist() == [9, 7, 0]
    operators.fill_bonus_tokens_cpu(torch.tensor([[1, 2], [3, 4]]), torch.tensor([2, 1]), out, 2)
    assert out.tolist() == [2, 3, 0]


def test_rows_are_read_before_they_are_written():
    buffer = torch.arange(12.0).view(4, 3)
    addresses, strides = torch.tensor([buffer.data_ptr()]), torch.tensor([12])
    places = torch.tensor([1, 2]), torch.tensor([0, 1])
    operators.copy_all_layer_kv_cache_cpu(addresses, strides, *places)
    assert buffer[:, 0].tolist() == [0.0, 0.0, 3.0, 9.0]


def test_tokens_are_rotated():
    tokens, starts = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 3])
    lengths, new = torch.tensor([3, 2]), torch.tensor([[8], [9]])
    operators.rotate_input_ids_cpu(tokens, starts, lengths, new, None)
    assert tokens.tolist() == [2, 3, 8, 5, 9]


def test_a_name_that_is_absent_says_so(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    operators.install()
    with monkeypatch.context() as patch:
        for name in ("sgl_kernel", "sgl_kernel.speculative"):
            patch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module("sgl_kernel.speculative")
        assert module.fill_bonus_tokens_cpu is operators.fill_bonus_tokens_cpu
        with pytest.raises(NotImplementedError, match=r"sgl_kernel\.gelu is not installed"):
            module.gelu(1)
