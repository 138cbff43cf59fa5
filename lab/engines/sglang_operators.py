"""`install`: a module in place of `sgl_kernel`, whose build for CPUs no index has.

SGLang imports names of it on a CPU, and calls few: those of drafts are here, in torch, by what
SGLang's own Triton kernels say of them. A call of any other raises NotImplementedError with its
name.
"""

from __future__ import annotations

import ctypes
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

NAME = "sgl_kernel"
VERSION = "0.4.10"  # that SGLang 0.5.23 asks for


def install() -> None:
    """Let imports of `sgl_kernel` and of what is below it find the functions of this file."""
    if NAME not in sys.modules:
        sys.meta_path.append(_Finder())


class _Absent:
    """A name of the real module; calling it says so."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *given: Any, **named: Any) -> Any:
        raise NotImplementedError(f"{NAME}.{self.name} is not installed, and was called")

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.name}.{name}")


class _Finder:
    """Finds the module, and any module below it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != NAME:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        vars(module).update({f.__name__: f for f in OPERATORS}, __version__=VERSION)
        vars(module)["__getattr__"] = _absent
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing: the names are there."""


def _absent(name: str) -> _Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent(name)


# ---- drafts: names, order of arguments and what is written are those of SGLang's calls


def reconstruct_indices_from_tree_mask(
    mask: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor, index: torch.Tensor,
    child: torch.Tensor, sibling: torch.Tensor, count: int, number: int,
) -> None:  # fmt: skip
    """Write the links of trees of drafts that a mask of ancestors describes; -1 where none is."""
    tree = mask.view(count, number, number).bool().tolist()
    for row, seen in enumerate(tree):
        above = [[j for j in range(i) if seen[i][j]] for i in range(number)]
        parents = [max(some, default=-1) for some in above]
        for i in range(number):
            later = range(i + 1, number)
            positions[row * number + i] = len(above[i]) + int(lengths[row])
            index[row, i] = row * number + i
            child[row, i] = next((k for k in later if seen[k][i]), -1)
            alike = (k for k in later if parents[k] == parents[i] >= 0)
            sibling[row, i] = next(alike, -1)


def verify_tree_greedy_cpu(
    predicts: torch.Tensor, accept_index: torch.Tensor, accept_token_num: torch.Tensor,
    candidates: torch.Tensor, retrive_index: torch.Tensor, retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor, target_predict: torch.Tensor,
) -> None:  # fmt: skip
    """Follow each tree from its root along the drafts that the model itself predicts."""
    best = target_predict.flatten()
    for row, drafts in enumerate(candidates.tolist()):
        last = int(retrive_index[row, 0])
        accept_index[row, 0] = last
        count, node = 0, 0
        while count + 1 < accept_index.shape[1]:
            node = int(retrive_next_token[row, node])
            while node != -1 and drafts[node] != int(best[last]):
                node = int(retrive_next_sibling[row, node])
            if node == -1:
                break
            predicts[last] = best[last]
            count, last = count + 1, int(retrive_index[row, node])
            accept_index[row, count] = last
        accept_token_num[row] = count
        predicts[last] = best[last]


def build_tree_kernel_efficient_cpu(
    parents: torch.Tensor, selected: torch.Tensor, lengths: torch.Tensor, *given: Any
) -> None:
    """Describe chains of drafts as trees.

    Args:
        given: mask, positions, index, child, sibling, all written; branches, depth, number of
            drafts; mode, 0 for a mask over all keys.

    Raises:
        NotImplementedError: for more than one branch.
    """
    mask, positions, index, child, _, branches, _, number, mode = given
    if branches != 1:
        raise NotImplementedError(f"{branches} branches of drafts on a CPU")
    begin = 0
    for row, length in enumerate(lengths.tolist()):
        before = length * (int(mode) == 0)
        for i in range(number):
            positions[row * number + i] = length + i
            index[row, i] = row * number + i
            child[row, i] = i + 1 if i + 1 < number else -1
            line = mask[begin : begin + before + number]
            line[: before + i + 1], line[before + i + 1 :] = 1, 0
            begin += before + number


def assign_extend_cache_locs_cpu(
    requests: torch.Tensor, table: torch.Tensor, begin: torch.Tensor, end: torch.Tensor,
    slots: torch.Tensor, width: int,
) -> None:  # fmt: skip
    """Write the slots of positions from begin to end, request behind request."""
    bounds = zip(requests.tolist(), begin.tolist(), end.tolist(), strict=False)
    found = torch.cat([table[row, first:last] for row, first, last in bounds])
    slots[: len(found)] = found.to(slots.dtype)


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor, table: torch.Tensor, begin: torch.Tensor, end: torch.Tensor,
    slots: torch.Tensor, width: int,
) -> None:  # fmt: skip
    """Write slots to the positions from begin to end, request behind request."""
    first = 0
    for row, start, stop in zip(requests.tolist(), begin.tolist(), end.tolist(), strict=False):
        table[row, start:stop] = slots[first : first + stop - start].to(table.dtype)
        first += stop - start


def assign_draft_cache_locs_contiguous_cpu(
    requests: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor,
    width: int, branches: int, steps: int,
) -> None:  # fmt: skip
    """Write the slots of each request's drafts, which follow its keys."""
    ends = lengths + branches * steps
    assign_extend_cache_locs_cpu(requests, table, lengths, ends, slots, width)


def fill_accept_out_cache_loc_cpu(
    accepted: torch.Tensor, slots: torch.Tensor, out: torch.Tensor
) -> None:
    """Write the slots of accepted drafts; -1 is none."""
    found = slots[accepted[accepted > -1].long()]
    out[: len(found)] = found.to(out.dtype)


def fill_bonus_tokens_cpu(
    tokens: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, width: int
) -> None:
    """Write the last accepted token of each request."""
    rows = torch.arange(len(lengths))
    out[: len(rows)] = tokens.flatten()[rows * width + lengths.long() - 1].to(out.dtype)


def rotate_input_ids_cpu(
    tokens: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, new: torch.Tensor,
    places: torch.Tensor | None,
) -> None:  # fmt: skip
    """Drop the first token of each request, and put a new one at its end or at a place."""
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        if length:
            last = start + length - 1
            tokens[start:last] = tokens[start + 1 : last + 1].clone()
            tokens[last if places is None else int(places[row])] = new.flatten()[row]


def copy_all_layer_kv_cache_cpu(
    buffers: torch.Tensor, strides: torch.Tensor, targets: torch.Tensor, sources: torch.Tensor
) -> None:
    """Copy rows of all buffers, whose addresses are given; all are read before one is written."""
    for base, stride in zip(buffers.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + row * stride, stride) for row in sources.tolist()]
        for row, data in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(base + row * stride, data, stride)


OPERATORS = (
    reconstruct_indices_from_tree_mask,
    verify_tree_greedy_cpu,
    build_tree_kernel_efficient_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    assign_draft_cache_locs_contiguous_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
    copy_all_layer_kv_cache_cpu,
)
