"""Trees of draft tokens: any words, at any place among the keys, beside every other mask."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from fmha import attention
from fmha.shared import load, two_rows, walk
from fmha.sm90 import math, products
from gqa_lowlatency import decode
from kernelkit.call.launch import emulation
from kernelkit.device import online_softmax
from lab.problems import attention as cases
from lab.problems.attention import PATIENCE, Case
from lab.problems.trees import words_of_tree
from lab.tools.groups import TREES
from ptxemu import Options
from tests.fmha import test_kernel
from tests.fmha.test_kernel import by_group

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

ARCHS = ("sm_100a", "sm_90a", "sm_89")
CHECKED = Options(policy="adversarial", seed=2, check=True, limit=PATIENCE)
FRIENDLY = Options(policy="round-robin", limit=PATIENCE)

# One kernel for all of them: lengths, words and offsets are not in a config.
PLAIN = tuple(
    Case(tokens, keys, (2, 1), 2, tree=kind, pack_heads=True)
    for kind in TREES
    for tokens, keys in ((1, 200), (8, 129), (33, 300), (64, 128), (64, 170))
)
OTHERS = (
    Case(64, 300, (2, 1), 2, tree="branches", pack_heads=False),
    Case(17, 200, (4, 1), 2, tree="mask", q_offset=(140, 60)),
    Case(64, 200, tree="mask", q_offset=(-20,)),
    Case(0, 300, (2, 1), 4, q_lens=(64, 0, 5, 1), kv_lens=(300, 9, 5, 70), page_size=16,
         tree="branches"),
    Case(0, 0, (3, 1), 3, q_lens=(8, 60, 3), k_lens=(20, 300, 3), tree="mask"),
    Case(64, 60, (2, 2), 2, tree="branches"),  # the first tokens are before the first key
    Case(33, 400, (2, 1), 2, tree="branches", window=(40, None)),
    Case(64, 400, (2, 1), 2, tree="block", window=(3, None), sink_tokens=5, sinks=True),
    Case(64, 300, (2, 1), tree="mask", window=(100, None), sink_tokens=150, causal=True),
    Case(40, 300, (8, 1), tree="branches", dims=(128, 128), softcap=15.0),
    Case(16, 260, (2, 1), tree="branches", dims=(192, 128), normalize=False),
    Case(16, 260, (4, 1), tree="mask", dims=(256, 256)),
    Case(64, 333, (4, 1), tree="branches", dims=(96, 96), sinks=True, out_dtype="fp32"),
)  # fmt: skip
OF_LARGE_GPUS = (
    Case(24, 200, (8, 1), tree="branches", dims=(512, 512)),
    Case(40, 333, (4, 1), 2, tree="branches", dtype="e4m3", dims=(128, 128), scales=True),
    Case(40, 333, (4, 1), 2, tree="mask", kv_dtype="e4m3", window=(64, None)),
)


def check(case: Case, arch: str, *schedules: Options) -> None:
    if arch == "sm_89":
        case = dataclasses.replace(case, instructions="mma.sync")
    test_kernel.check(case, schedules, arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", by_group(PLAIN))
def test_any_words(case, arch):
    check(case, arch, CHECKED)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", by_group(OTHERS))
def test_words_beside_other_masks(case, arch):
    check(case, arch, CHECKED, FRIENDLY)


@pytest.mark.parametrize("arch", ARCHS[:2])
@pytest.mark.parametrize("case", by_group(OF_LARGE_GPUS))
def test_words_beside_what_tma_and_fp8_need(case, arch):
    check(case, arch, CHECKED, FRIENDLY)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_chain_has_the_bits_of_a_causal_block(arch):
    case = Case(40, 300, (2, 1), 2, pack_heads=True, tree="chain")
    if arch == "sm_89":
        case = dataclasses.replace(case, instructions="mma.sync")
    inputs, arguments = case.inputs(), case.arguments()
    with emulation(FRIENDLY, arch=arch):
        tree = attention(*inputs, **arguments)
        del arguments["tree"]
        causal = attention(*inputs, **(arguments | {"causal": True}))
    assert cases.same_bits(tree, causal)


@pytest.mark.parametrize("seed", range(100))
def test_random_words(seed):
    """Ten problems each for the kernels of all architectures."""
    pick = random.Random(seed)
    for _ in range(10):
        tokens = pick.randint(1, 64)
        case = Case(
            tokens, pick.randint(1, 400), (2, 1), 2, tree=pick.choice(TREES), pack_heads=True,
            amplitude=pick.choice((1.0, 4.0)),
        )  # fmt: skip
        check(case, pick.choice(ARCHS), FRIENDLY)


WALKERS = (load, math)
CURES = {  # what the kernel of Hopper does -> (module, its users, name, text, replacement)
    "reads the row's own word": (
        walk, [walk], "branch_of", "tensors.tables.tree[row]", "tensors.tables.tree[work.q_start]",
    ),
    "begins with the first token": (
        walk, [walk], "branch_of", "Branch(Uint64(word), work.offset)",
        "Branch(Uint64(word), work.offset + 1)",
    ),
    "masks the tiles of the tree": (
        walk, WALKERS, "plan_walk",
        "first_end = cutlass.max(cutlass.min(work.offset, work.full_end), 0)", "pass",
    ),
    "begins windows at a row's depth": (
        walk, [products], "row_of", "depth = Int32(cute.arch.popc(branch.word & earlier))", "pass",
    ),
    "fetches what a root sees": (
        walk, WALKERS, "plan_walk", "Int32(0) if cutlass.const_expr(config.tree) else first",
        "first",
    ),
    "gathers the columns of two rows": (
        online_softmax, [two_rows], "RowView", "<< (first + pair) // 4", "<< first // 4 + pair",
    ),
}  # fmt: skip
SEEN_BY = Case(64, 400, (4, 1), 2, tree="branches", window=(30, None), pack_heads=True)
UNBOUNDED = dataclasses.replace(SEEN_BY, window=(None, None))


@pytest.mark.parametrize("cure", CURES)
def test_a_kernel_without_its_cure_is_noticed(changed, cure):
    module, users, name, *replacement = CURES[cure]
    changed(module, users, name, tuple(replacement))
    case = UNBOUNDED if cure == "masks the tiles of the tree" else SEEN_BY
    results = cases.run(case, FRIENDLY, arch="sm_90a")
    assert not all(report.ok for report in cases.judge(case, results))


def test_words_outside_the_limits_are_refused():
    q, k = torch.zeros(2, 8, 2, 64).bfloat16(), torch.zeros(2, 90, 1, 64).bfloat16()
    tree = torch.zeros(2, 8, dtype=torch.int64)
    wide = torch.zeros(2, 65, 2, 64).bfloat16()
    tables = (torch.zeros(90, 32), torch.zeros(90, 32))
    for words, error in (
        (lambda: attention(q, k, k, tree=tree.int()), "tree is torch.int32"),
        (lambda: attention(q, k, k, tree=tree[:1]), "tree"),
        (lambda: attention(q, k, k, tree=tree, window=(None, 3)), "tree conflicts with window"),
        (lambda: attention(wide, k, k, tree=torch.zeros(2, 65).long()), "65 tokens of an entry"),
        (lambda: attention(q, k, k, tree=tree, rope=tables), "tree with rope"),
    ):
        with pytest.raises((ValueError, NotImplementedError), match=error):
            words()


@pytest.mark.parametrize("attend", [attention, decode])
def test_words_may_be_a_column_of_a_wider_table(attend):
    q, k = torch.randn(3, 1, 2, 64).bfloat16(), torch.randn(3, 5, 1, 64).bfloat16()
    table = torch.tensor([[1, 0], [0, 1], [1, 0]])
    with emulation(FRIENDLY):
        found, wanted = (
            attend(q, k, k, tree=words) for words in (table[:, :1], table[:, :1].contiguous())
        )
    assert torch.equal(found, wanted)


def test_words_of_one_entry_do_not_matter_to_another():
    pick = random.Random(0)
    words = torch.stack([words_of_tree("branches", 16, pick) for _ in range(2)])
    q, k = torch.randn(2, 16, 2, 64).bfloat16(), torch.randn(2, 90, 1, 64).bfloat16()
    with emulation(FRIENDLY):
        first = attention(q, k, k, tree=words)
        words[1] = -1
        second = attention(q, k, k, tree=words)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
