"""Measured choices: every family uses them, callers override them, and without any there is no
cost.
"""

from __future__ import annotations

import random
import timeit
import warnings
from dataclasses import dataclass, field, replace

import pytest
import torch

import gqa_lowlatency
import moe
import q8_0
from fmha import warm as fmha_warm
from gqa_lowlatency import choose as decode_choose
from gqa_lowlatency import warm as gqa_warm
from gqa_lowlatency.config import DecodeConfig
from kernelkit.compile.arch import written_for
from kernelkit.compile.compiler import collecting
from kernelkit.tune import tuner as tune
from kernelkit.tune.choices import (
    Tuned,
    TunedWarning,
    are_open,
    described,
    forcing,
    standing_for,
    text_of,
)
from mla.attention import warm as mla_warm
from moe import warm as moe_warm
from q8_0 import warm as q8_0_warm
from q8_0.blocks import soa_bytes

META = torch.device("meta")
GPU = torch.device("cuda", 0)  # its table exists
# operator -> architectures that have their own kernels
ARCHS = {
    "attention": ("sm_100a", "sm_90a", "sm_89"),
    "decode": ("sm_100a", "sm_90a", "sm_89"),
    "grouped_gemm": ("sm_100a",),
    "mixed_gemm": ("sm_100a", "sm_90a"),
    "mla": ("sm_90a",),
    "q8_0.matvec": ("sm_90a", "sm_89"),
    "q8_0.product": ("sm_90a",),
}


@dataclass(frozen=True)
class Item:
    size: int
    width: int = 0
    inner: DecodeConfig = field(default_factory=DecodeConfig)


def problem(item: Item) -> Item | None:
    return item if are_open(item, ("width",)) else None


def check(item: Item) -> None:
    if item.width > 8:
        raise ValueError(f"width {item.width}: at most 8")


def applied(tuned: Tuned, item: Item) -> Item:
    return tuned.applied(item, GPU, problem, check)


@pytest.fixture
def tuned() -> Tuned:
    """Choices for items of three sizes, two of which do not fit."""
    made = Tuned("items", {"sm_90a": ["none"]}, ["width"])
    wanted = {1: {"width": 4}, 2: {"width": 16}, 3: {"size": 5}}
    made._tables[GPU] = {text_of(Item(size)): choice for size, choice in wanted.items()}
    return made


def test_a_measured_choice_is_taken_for_its_problem_alone(tuned):
    assert applied(tuned, Item(1)).width == 4
    plain = Item(4)
    assert applied(tuned, plain) is plain


def test_what_a_caller_gives_wins(tuned):
    given = Item(1, width=2)
    assert applied(tuned, given) is given


@pytest.mark.parametrize(("size", "why"), [(2, "at most 8"), (3, "option size")])
def test_a_choice_that_does_not_fit_is_ignored_and_said_once(tuned, size, why):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            item = Item(size)
            assert applied(tuned, item) is item
    assert [why in str(found.message) for found in said] == [True]
    assert said[0].category is TunedWarning


def test_forced_choices_are_for_one_operator_and_raise_where_they_do_not_fit(tuned):
    with forcing("items", {"width": 8}) as forced:
        assert applied(tuned, Item(1)).width == 8
    assert forced.problems == [Item(1)]
    with forcing("items", {}):
        assert applied(tuned, Item(1)).width == 0
    with forcing("others", {"width": 8}):
        assert applied(tuned, Item(1)).width == 0
    with forcing("items", {"width": 9}), pytest.raises(ValueError, match="at most 8"):
        applied(tuned, Item(1))


def test_a_file_is_read_once_and_again_when_forgotten(tuned, monkeypatch):
    reads = []
    monkeypatch.setattr("kernelkit.tune.files.choices_here", lambda *_: reads.append(1) or {})
    applied(tuned, Item(1))
    assert not reads
    tuned.forget()
    for _ in range(3):
        assert applied(tuned, Item(1)).width == 0
    assert len(reads) == 1
    assert tuned.choices(GPU) == {}
    assert len(reads) == 1


def test_the_emulator_has_no_measured_choices(tuned):
    item = Item(1)
    assert tuned.applied(item, torch.device("cpu"), problem, check) is item
    assert tuned.choices(torch.device("cpu")) == {}


def test_a_problem_is_told_by_what_differs_from_the_default():
    assert described(Item(1, inner=DecodeConfig(pdl=True))) == {"size": 1, "inner": {"pdl": True}}
    assert described(DecodeConfig(cluster=True)) == {"cluster": True}, "which is no 1"
    texts = {text_of(Item(n, n % 2, DecodeConfig(group=g))) for n in (1, 2) for g in (True, 1, 8)}
    assert len(texts) == 6
    with pytest.raises(TypeError):
        described(Item(1, inner=[torch.zeros(1)]))


def test_a_look_up_without_files_costs_less_than_a_microsecond(tuned):
    tuned._tables[GPU] = {}
    item, runs = Item(1), 20_000
    take = lambda: tuned.applied(item, GPU, problem, check)  # noqa: E731
    assert min(timeit.repeat(take, number=runs, repeat=5)) / runs < 1e-6


# ---- families


def asked(name: str, arch: str, choice: dict) -> tuple[list, object]:
    """Return the kernels of the default shape with a choice, and its problem."""
    about = tune.subject(name)
    operator, given = about.call(about.shape(), META, arch)
    with collecting() as keys, forcing(name, choice) as forced:
        operator.run(operator.schema.flat(given))
    return keys, forced.problems[0]


@pytest.mark.parametrize(("name", "arch"), [(n, arch) for n in ARCHS for arch in ARCHS[n]])
def test_a_choice_is_what_is_compiled(name, arch):
    rules, found = asked(name, arch, {})
    kernels, fitting = set(), 0
    for choice in tune.subject(name).choices(found, arch):
        try:
            keys, _ = asked(name, arch, choice)
        except (ValueError, NotImplementedError):
            continue
        (key,) = keys
        fitting += 1
        kernels.add(key)
        config = vars(key.config)
        for option in {*choice} & {*config} - {"parts"}:
            assert config[option] == choice[option]
    assert len(kernels) >= min(3, fitting), "options decide what is compiled"
    assert kernels - {*rules}
    known = tune.subject(name).tuned.kernels  # whose sources a measurement is valid for
    assert {key.source for key in kernels} <= {*(known.get(arch) or known[written_for(arch)])}


@pytest.mark.parametrize("name", ARCHS)
def test_what_is_stored_for_a_shape_is_found_by_its_call(name, monkeypatch):
    """The choice is found by the text of its problem, in a process whose tensors are on a GPU."""
    arch = ARCHS[name][-1]
    rules, found = asked(name, arch, {})
    about = tune.subject(name)
    for choice in about.choices(found, arch):
        keys, _ = asked(name, arch, choice)
        if keys != rules:
            break
    table = {text_of(found): choice}
    monkeypatch.setitem(about.tuned._tables, GPU, table)
    real = Tuned.applied

    def on_gpu(self, item, device, *others):
        return real(self, item, GPU, *others)

    monkeypatch.setattr(Tuned, "applied", on_gpu)
    operator, given = about.call(about.shape(), META, arch)
    with collecting() as with_table:
        operator.run(operator.schema.flat(given))
    assert with_table == keys


def decode_keys(monkeypatch, **options) -> list:
    q, k = torch.empty(2, 16, 128).bfloat16(), torch.empty(2, 4096, 2, 128).bfloat16()
    forced = {"cluster": 2, "parts": 2, "warps": 8, "step": 16}
    with collecting() as keys, forcing("decode", forced):
        gqa_lowlatency.decode(q, k, k, arch="sm_90a", **options)
    return keys


def test_decode_takes_a_choice_unless_something_is_given_or_bits_are_promised(monkeypatch):
    (key,) = decode_keys(monkeypatch)
    assert (key.config.cluster, key.config.parts, key.config.warps) == (2, True, 8)
    (fixed,) = decode_keys(monkeypatch, batch_invariant=True)
    (given,) = decode_keys(monkeypatch, config=DecodeConfig(cluster=4))
    (parts,) = decode_keys(monkeypatch, parts=1)
    assert fixed.config.cluster == 8
    assert given.config.cluster == 4
    assert not parts.config.parts


def test_latent_attention_takes_a_choice_and_its_warm_up_knows_it(monkeypatch):
    choice = {"kernel": "warp", "cluster": 1, "parts": 3}
    about = tune.subject("mla")
    shape = about.shape(entries=2, keys=512, heads=64, record="fp8_584", listed=True, extra=64)
    operator, given = about.call(shape, META, "sm_90a")
    with collecting() as keys, forcing("mla", choice) as forced:
        operator.run(operator.schema.flat(given))
        operator.run(operator.schema.flat({**given, "batch_invariant": True}))
        operator.run(operator.schema.flat({**given, "parts": 2}))
    measured, fixed, parts = keys
    assert measured.module.endswith("portable.kernel")
    assert measured.config.parts
    assert {fixed.module, parts.module} == {"mla.attention.sm90.kernel"}
    arguments = operator.arguments(given)
    plain = mla_warm.kernels_for(arguments, [2], [arguments.longest])
    table = {text_of(forced.problems[0]): choice}
    monkeypatch.setattr(Tuned, "choices", lambda *_: table)
    assert mla_warm.kernels_for(arguments, [2], [arguments.longest]) == [*plain, measured]
    assert measured not in mla_warm.kernels_for(arguments, [3], [arguments.longest])


def test_what_follows_from_a_measured_cluster_is_chosen_as_ever():
    """An example is a ring for a CTA alone on its SM, which a cluster requested by the user would
    not have."""
    arguments = decode_choose.Load(keys=65536, heads=8)
    wished = DecodeConfig(cluster=0, group=8)
    rules = decode_choose.config_for(wished, "sm_90a", arguments)
    measured = decode_choose.config_for(wished, "sm_90a", replace(arguments, cluster=rules.cluster))
    assert measured == rules
    assert rules.alone


def test_a_fused_layer_takes_choices_of_both_products():
    x, logits = torch.randn(3, 128).bfloat16(), torch.randn(3, 2)
    experts = moe.pack(
        torch.randn(2, 256, 128).bfloat16(), torch.randn(2, 128, 128).bfloat16(), "mxfp4"
    )
    arranged = moe.arrange(experts)
    with forcing("mixed_gemm", {"tile_rows": 32, "teams": 2, "parts": 1}):
        given = x, arranged, logits, moe.Router(1), [3]
        keys = moe_warm.kernels_for(*given, arch="sm_90a", few_rows=False)
    tiles = [key.config.tile_rows for key in keys if key.source == "moe.mixed.sm90.kernel"]
    assert tiles == [32, 32]


def test_q8_0_keeps_its_bits():
    """No choice changes the order of sums."""
    for seed in range(20):
        about = tune.subject("q8_0.matvec")
        shape = about.draw(random.Random(seed))
        operator, given = about.call(shape, META, "sm_90a")
        for choice in ({}, None):
            with collecting() as keys, forcing("q8_0.matvec", choice or {}) as forced:
                operator.run(operator.schema.flat(given))
        (rules,) = keys
        for choice in about.choices(forced.problems[0], "sm_90a"):
            made = replace(rules.config, **choice)
            assert made.splits == rules.config.splits
            assert made.splits == 1 or made.unrolled == rules.config.unrolled
            assert made.warps % made.splits == 0


# ---- warm-ups


def other_choice(name: str, arch: str) -> tuple[dict, str, list]:
    """Return a choice that compiles another kernel than the rules, its problem, and that kernel."""
    rules, found = asked(name, arch, {})
    choices = tune.subject(name).choices(found, arch)
    if name == "q8_0.product":  # a warm-up has all kernels that the rules know, which come first
        choices = choices[::-1]
    for choice in choices:
        keys, _ = asked(name, arch, choice)
        if keys != rules:
            return choice, text_of(found), keys
    raise AssertionError("no other kernel")


WARM = {
    "decode": (gqa_warm, {"batches": [1], "lengths": [8192]}),
    "attention": (fmha_warm, {"batches": [1], "lengths": [4096]}),
}


@pytest.mark.parametrize("name", WARM)
def test_a_warm_up_finds_what_was_measured(name, monkeypatch):
    """The warm-up finds choices of the requested sizes, and no others."""
    module, sizes = WARM[name]
    choice, text, keys = other_choice(name, "sm_90a")
    about = tune.subject(name)
    operator, given = about.call(about.shape(), META, "sm_90a")
    arguments = operator.arguments(given)
    plain = module.kernels_for(arguments, *sizes.values())
    assert keys[0] not in plain
    monkeypatch.setattr(Tuned, "choices", lambda *_: {text: choice})
    assert module.kernels_for(arguments, *sizes.values()) == [*plain, *keys]
    others = module.kernels_for(arguments, [2], [*sizes.values()][1])
    assert keys[0] not in others


@pytest.mark.parametrize("stands", [False, True])
def test_tensors_without_memory_may_stand_for_those_of_a_gpu(tuned, stands):
    with standing_for(GPU if stands else torch.device("cpu")):
        assert tuned.applied(Item(1), META, problem, check).width == 4 * stands
        assert tuned.applied(Item(1), torch.device("cpu"), problem, check).width == 0


def test_warm_ups_of_products_stand_for_their_device(monkeypatch):
    """These are q8_0 with few tokens and many, and a layer of experts; also between thresholds."""
    weights = q8_0.Weights(torch.empty(soa_bytes(4096, 4096), dtype=torch.uint8, device=META),
                           4096, 4096, "soa")  # fmt: skip
    few, many = (other_choice(name, "sm_90a") for name in ("q8_0.matvec", "q8_0.product"))
    tables = {"q8_0.matvec": {few[1]: few[0]}, "q8_0.product": {many[1]: many[0]}}
    place, counts = ("sm_90a", 148), [1, *range(1900, 2200)]
    plain = q8_0_warm.kernels_for(weights, ["bf16"], counts, False, place)
    for name, table in tables.items():
        monkeypatch.setitem(tune.subject(name).tuned._tables, GPU, table)
    monkeypatch.setattr(Tuned, "choices", lambda self, _: tables.get(self.name, {}))
    real = Tuned.applied
    monkeypatch.setattr(
        Tuned, "applied", lambda self, item, device, *more: real(self, item, GPU, *more)
    )
    found = q8_0_warm.kernels_for(weights, ["bf16"], counts, False, place)
    assert {*few[2], *many[2]} <= {*found} - {*plain}
