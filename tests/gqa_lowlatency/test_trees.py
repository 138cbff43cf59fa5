"""Trees of draft tokens: any words, beside every other mask, in each way of dealing keys."""

from __future__ import annotations

import random

import pytest
import torch

from fmha import attention
from gqa_lowlatency import decode
from gqa_lowlatency.portable import stream
from gqa_lowlatency.shared import split
from gqa_lowlatency.sm100.roles import epilogue
from kernelkit.call.launch import emulation
from kernelkit.trees import tree_of_mask, tree_of_parents
from lab.problems.decode import Case
from lab.problems.trees import words_of_tree
from lab.tools.groups import TREES
from ptxemu import Options
from tests.gqa_lowlatency import cases
from tests.gqa_lowlatency.test_kernel import ADVERSARIAL, CHECKED

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

ARCHS = ("sm_100a", "sm_90a", "sm_89")
PLAIN = tuple(
    Case((300, 9, 128), tokens=tokens, tree=kind, amplitude=amplitude)
    for kind in TREES
    for tokens, amplitude in ((8, 1.0), (8, 4.0), (5, 1.0), (1, 1.0))
)
OTHERS = (
    Case((300, 5, 0), (5, 1), 8, tree="branches", parts=2, cluster=1),
    Case((200, 64), (4, 2), 7, tree="mask", window=40, keys=16),
    Case((200, 64), (2, 2), 8, tree="block", window=2, sink_tokens=9, sinks=True, keys="dense"),
    Case((500, 33), (16, 1), 8, tree="branches", kv_dtype="e4m3", scales="heads"),
    Case((333,), (8, 1), 4, tree="mask", head_dim=64, softcap=15.0, firsts=(100,)),
    Case((150, 9), (1, 1), 6, tree="branches", head_dim=256, keys=64),
    Case((90, 70), (8, 1), 1, tree="mask", flat=True),
)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_any_words(case, arch):
    cases.check(case, arch, CHECKED)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_words_beside_other_masks(case, arch):
    cases.check(case, arch, CHECKED, ADVERSARIAL)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_chain_has_the_bits_of_a_causal_block(arch):
    case = Case((300, 9), tokens=8, tree="chain")
    given = case.options() | case.launch_options(arch)
    with emulation(Options(), arch=arch):
        tree = decode(*case.inputs(), return_lse=True, **given)
        del given["tree"]
        causal = decode(*case.inputs(), return_lse=True, **given)
    assert all(torch.equal(first, second) for first, second in zip(tree, causal, strict=True))


@pytest.mark.parametrize("seed", range(100))
def test_random_words(seed):
    """Ten problems each for the kernels of all architectures."""
    pick = random.Random(seed)
    for _ in range(10):
        lens = tuple(pick.randint(0, 400) for _ in range(2))
        case = Case(lens, tokens=pick.choice((3, 8)), tree=pick.choice(TREES), cluster=1)
        cases.check(case, pick.choice(ARCHS), CHECKED)


CURES = {  # what the kernels do -> (architecture, module, its users, name, text, replacement)
    "read the entry's words": (
        "sm_90a", split, [split], "bytes_of_tree", "entry * config.q_tokens + token", "token",
    ),
    "begin with the first token": (
        "sm_90a", split, [split], "branch_of", "share.n_keys - config.q_tokens)", "share.n_keys)",
    ),
    "begin windows at a token's depth": (
        "sm_90a", split, [stream], "row_sees",
        "behind = config.q_tokens - 1 - Int32(cute.arch.popc(Uint32(earlier)))", "pass",
    ),
    "hide whole tiles of the tree": (
        "sm_100a", epilogue, [epilogue], "some_row_misses",
        "end = share.n_keys - config.q_tokens", "pass",
    ),
}  # fmt: skip
SEEN_BY = Case((384, 300), tokens=8, tree="branches", window=20, cluster=1)
UNBOUNDED = Case((384, 256), tokens=8, tree="mask", cluster=1)


@pytest.mark.parametrize("cure", CURES)
def test_a_kernel_without_its_cure_is_noticed(changed, cure):
    arch, module, users, name, *replacement = CURES[cure]
    changed(module, users, name, tuple(replacement))
    case = SEEN_BY if arch == "sm_90a" else UNBOUNDED
    with pytest.raises(AssertionError):
        cases.check(case, arch, CHECKED)


def test_words_of_parents_and_of_masks():
    parents = torch.tensor([-1, 0, 0, 1, 3, 2])
    mask = torch.eye(6, dtype=torch.bool)
    for token, parent in enumerate(parents.tolist()):
        while parent >= 0:
            mask[token, parent] = True
            parent = int(parents[parent])
    assert torch.equal(tree_of_parents(parents), tree_of_mask(mask))
    last = torch.arange(-1, 63)
    assert tree_of_parents(last)[63] == -1  # 64 bits


def test_torch_compile_makes_words():
    parents = torch.tensor([[-1, 0, 0, 1], [-1, -1, 1, 2]])
    compiled = torch.compile(tree_of_parents, fullgraph=True, backend="eager")
    assert torch.equal(compiled(parents), tree_of_parents(parents))


def test_what_is_no_tree_is_refused():
    for call, error in (
        (lambda: tree_of_parents(torch.tensor([-1, 2])), "from -1 to 1"),
        (lambda: tree_of_parents(torch.tensor([1, 0])), "its own ancestor"),
        (lambda: tree_of_parents(torch.zeros(2)), "parents is torch.float32"),
        (lambda: tree_of_parents(torch.zeros(65).int()), "65 tokens"),
        (lambda: tree_of_mask(torch.ones(2, 3) > 0), "expected"),
        (lambda: tree_of_mask(torch.ones(2, 2)), "mask is torch.float32"),
        (lambda: words_of_tree("block", 65, random.Random(0)), "65 query tokens of an entry"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            call()


def test_attention_takes_the_same_words():
    case = Case((200, 90), tokens=8, tree="branches", keys="dense")
    q, k, v = case.inputs()
    tree = case.options()["tree"]
    with emulation(Options()):
        first, second = decode(q, k, v, tree=tree), attention(q, k, v, tree=tree)
    assert (first.float() - second.float()).abs().max() < 0.02
