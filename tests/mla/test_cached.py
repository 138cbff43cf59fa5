"""Attention over a cache: one softmax over window entries and compressed entries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernelkit.numerics.tolerance import compare_output
from kvcache.layouts.models import Options, deepseek_v4
from kvcache.layouts.records import BF16_512, FP8_656
from kvcache.layouts.rows import Rows
from kvcache.movement import launch as movement_launch
from kvcache.movement import reference
from kvcache.planner.capacity import workspace_bytes
from mla import keys as cached_keys
from mla.api import Every, Selected, StepView, cached_attention, step_view
from mla.attention import launch as attention_launch
from mla.reference import Token, definition, rounded
from mla.window import PAGE, ChunkWindow, EntryPages, TokenWindow, see_window
from mla.workspace import Workspace, plan_workspace
from tests.kvcache.movement.rows_cases import checked
from tests.mla.cached_cases import BF16, LAYERS, Case, Model

FP8, PLAIN = Case("fp8"), Case("bf16")
ARCHS = ("sm_100a", "sm_90a")


def assert_good(reports) -> None:
    for kind, report in reports.items():
        assert report.ok, f"{kind}: {report}"


def lived(case: Case) -> tuple[Model, list]:
    """Return a model with a request whose ring has wrapped, one as long as its window, and a new
    one."""
    model = Model(case)
    return model, [model.admit(name, n) for name, n in (("a", 290), ("b", 127), ("c", 2))]


def sizes(workspace: Workspace) -> tuple[int, int]:
    return workspace.shared, workspace.each


# -- in a few seconds -----------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_decode(arch, poisoned_outputs):
    """The token of c has no entry to choose from yet: its past is empty."""
    model, (a, b, c) = lived(replace(FP8, arch=arch))
    assert_good(model.step({a: 1, b: 1, c: 1}, ["csa"], padding=2))
    assert_good(model.step({c: 1, a: 1}, ["csa"]))


@pytest.mark.parametrize("kind", LAYERS)
def test_decoding_is_one_launch_of_attention(kind, monkeypatch):
    """No entry is gathered and nothing is merged, whatever the past and the record."""
    launches = []
    for module in (attention_launch, movement_launch):
        launch = module.launch
        monkeypatch.setattr(
            module, "launch",
            lambda *given, launch=launch: (launches.append(given), launch(*given))[1],
        )  # fmt: skip
    model = Model(FP8)
    a, b = model.admit("a", 129), model.admit("b", 6)
    with model.cache.step({a: [7], b: [7]}) as step:
        model.compress(step)
        view, inputs = model.view(step), model.inputs(step)
        launches.clear()
        model.case = replace(model.case, workspace=0)
        o = model.attend(kind, inputs, view)
        assert len(launches) == 2
        launches.clear()
        again = model.attend(kind, replace(inputs, kv=None), view)  # it is in the ring by now
        assert len(launches) == 1
        assert torch.equal(again, o)
        model.remember(step, kind, inputs.kv)
        assert model.judge(kind, step, inputs, o).ok


@pytest.mark.parametrize("wrong", [{"window": 127}, {"window": 129}, {"sinks": False}], ids=str)
def test_a_wrong_reference_is_noticed(wrong, monkeypatch):
    """A key more or less, or a missing sink, changes the verdict."""
    model = Model(FP8)
    a = model.admit("a", 290)
    assert_good(model.step({a: 1}, ["csa"]))
    right = Model.tokens
    monkeypatch.setattr(Model, "tokens", lambda *given: right(*given, **wrong))
    assert not model.step({a: 1}, ["csa"])["csa"].ok


def test_a_small_workspace_is_more_launches(monkeypatch):
    """The bits of a chunk are the same."""
    model = Model(FP8)
    a, b = model.admit("a", 3), model.admit("b", 6)
    needs = plan_workspace(model.layout, 4, tokens=3, requests=2, longest=2, selected=6)
    with model.cache.step({a: [7] * 2, b: [7]}) as step:
        model.compress(step)
        view, inputs = model.view(step), model.inputs(step)
        groups, attend = [], cached_keys.OwnKeys.attend
        monkeypatch.setattr(
            cached_keys.OwnKeys, "attend",
            lambda keys, q, group, options: (
                groups.append(group), attend(keys, q, group, options)
            )[1],
        )  # fmt: skip
        found = []
        pools = model.cache.storage.pools
        before = {name: pool.clone() for name, pool in pools.items()}
        for bound in (needs.size(3), needs.size(2)):
            for name, pool in pools.items():
                pool.copy_(before[name])
            model.case = replace(model.case, workspace=bound)
            found.append(model.attend("csa", inputs, view))
        model.case = replace(model.case, workspace=needs.size(1) - 1)
        with pytest.raises(ValueError, match=f"at least {needs.size(1):,}, {needs.shared:,} for"):
            model.attend("csa", inputs, view)
    assert [(group.start, group.stop) for group in groups] == [(0, 3), (0, 2), (2, 3)]
    assert torch.equal(*found)


def test_the_workspace_in_the_terms_of_the_planner():
    """The workspace of a chunk is entries in BF16, as `kvcache.planner.capacity` counts them, and
    partial results; decoding has none."""
    layout = deepseek_v4("v4", [0, 4, 128], 128, Options(draft=2))
    for past in ({}, {"selected": 512}, {"entries": 3 * PAGE}):
        needs = plan_workspace(layout, 64, tokens=6, requests=3, longest=2, **past)
        assert sizes(needs) == (0, 0)
        assert needs.at_once(0, 6) == 6
    given = {"tokens": 500, "requests": 1, "longest": 500}
    each = 2 * 64 * 4 * (512 + 1)
    # 500 tokens and the 127 before them, at any offset: 6 pages at most.
    shared = workspace_bytes(layout, 6 * PAGE + 127) + 4 * 74_880
    assert sizes(plan_workspace(layout, 64, **given)) == (shared, 0)
    chosen = plan_workspace(layout, 64, **given, selected=512)
    assert sizes(chosen) == (shared, workspace_bytes(layout, 512) + each)
    every = plan_workspace(layout, 64, **given, entries=3 * PAGE)
    assert sizes(every) == (shared + workspace_bytes(layout, 3 * PAGE), each)


def bare(model: Model, step, view: StepView, kind: str, count: int) -> torch.Tensor:
    """Run cached_attention on tensors without values, on the meta device."""

    def moved(thing):
        if isinstance(thing, torch.Tensor):
            return thing.to("meta")
        if not isinstance(thing, Every | Selected | Rows | EntryPages | TokenWindow | ChunkWindow):
            return thing
        return type(thing)(**{name: moved(value) for name, value in vars(thing).items()})

    inputs = model.inputs(step)
    given = (inputs.q, inputs.kv, model.cache.rows("swa", 0), view.window)
    rope = tuple(map(moved, model.rope))
    past = moved(model.past(kind, inputs, view))
    options = {"rope": rope, "sinks": moved(model.sinks), "past": past, "workspace": count}
    return cached_attention(*map(moved, given), **options)


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("record", ["fp8", "bf16"])
def test_no_value_on_a_gpu_is_waited_for(record, tokens):
    """Tensors on meta simulate those of a GPU: reading a value raises."""
    model = Model(Case(record))
    a, b = model.admit("a", 3), model.admit("b", 6)
    with model.cache.step({a: [7] * tokens, b: [7]}) as step:
        arrays = {name: array.to("meta") for name, array in step.tensors("cpu").items()}
        assert step_view(model.layout, arrays, longest=step.longest).pages.keys() == {"hca"}
        for kind in LAYERS:
            found = bare(model, step, model.view(step), kind, 3 << 20)
            assert (found.shape, found.dtype) == ((tokens + 1, 4, 512), BF16)
            assert found.device.type == "meta"


REFUSED = [  # an argument, its wrong value, and the message
    ("q", lambda q: q[:, :, :64], r"q is torch.bfloat16 \(2, 4, 64\)"),
    ("q", lambda q: q.half(), r"q is torch.float16 \(2, 4, 512\)"),
    ("q", lambda q: q[:1], "the step has 2 tokens"),
    ("q", lambda q: q.clone().requires_grad_(), "q requires grad"),
    ("kv", lambda kv: kv[:1], r"kv has shape \(1, 512\), expected \(2, 512\)"),
    ("ring", lambda x: replace(x, rows=127), "127 rows, .* made for 128"),
    ("ring", lambda x: replace(x, record=FP8_656), "ring of fp8_656: supported"),
    ("past", lambda x: replace(x, entries=x.entries.int()), r"entries is torch.int32 \(2, 6\)"),
    ("past", lambda x: replace(x, chosen=x.chosen[:1]), r"chosen is torch.int32 \(1,\)"),
]


def test_what_is_refused_writes_nothing():
    model = Model(FP8)
    a, b = model.admit("a", 3), model.admit("b", 6)
    with model.cache.step({a: [7], b: [7]}) as step:
        view, inputs = model.view(step), model.inputs(step)
        past = model.selected(inputs)
        given = {"q": inputs.q, "kv": inputs.kv, "ring": model.cache.rows("swa", 1), "past": past}
        before = given["ring"].pool.clone()
        for name, change, message in REFUSED:
            changed = given | {name: change(given[name])}
            with pytest.raises((ValueError, NotImplementedError), match=message):
                cached_attention(window=view.window, rope=model.rope, **changed)
        assert torch.equal(before, given["ring"].pool)


# -- broad ----------------------------------------------------------------------------------------

DECODING = [
    replace(FP8, sinks=False, kv=torch.float32), replace(PLAIN, window=24, draft=1),
    replace(FP8, selected=70, draft=1), replace(PLAIN, draft=3), FP8, PLAIN,
    replace(PLAIN, block_tokens=1024), replace(FP8, arch="sm_90a", selected=70, draft=1),
    replace(PLAIN, arch="sm_90a"), replace(FP8, arch="sm_89"), replace(PLAIN, arch="sm_80"),
]  # fmt: skip


@pytest.mark.parametrize("case", DECODING, ids=str)
def test_one_token_each(case, poisoned_outputs):
    """On the way b completes its first HCA entry, and c its first CSA entry."""
    model, (a, b, c) = lived(case)
    for _ in range(2):
        assert_good(model.step({a: 1, b: 1, c: 1}, padding=1))


DRAFTS = [replace(FP8, draft=3), replace(PLAIN, draft=3)]


@pytest.mark.parametrize("case", DRAFTS, ids=str)
def test_drafts(case, poisoned_outputs):
    """Rolled-back tokens leave nothing, also across the end of a ring (130 rows)."""
    model, (a, b, c) = lived(case)
    for _ in range(2):
        assert_good(model.step({a: 3, b: 2, c: 1}))
        model.rollback(a, 2)
        model.rollback(b, 1)
    d = model.admit("d", 389)
    for _ in range(2):
        assert_good(model.step({d: 3, b: 3}))
        model.rollback(d, 3)


NARROW = {"window": 24, "sinks": False, "draft": 3}
CHUNKS = [FP8, PLAIN, replace(FP8, **NARROW), replace(PLAIN, **NARROW)]


@pytest.mark.parametrize("case", CHUNKS, ids=str)
def test_chunks_among_decoding(case, poisoned_outputs):
    model, (a, b, c) = lived(case)
    assert_good(model.step({a: 9, b: 1, c: 14}))
    assert_good(model.step({c: 30, a: 1}, ["swa", "hca"]))
    assert_good(model.step({a: 1, b: 1, c: 1}))


@pytest.mark.parametrize("case", [PLAIN, FP8], ids=str)
def test_a_chunk_longer_than_its_ring(case, poisoned_outputs):
    model = Model(case)
    a, b = (model.admit(name, tokens) for name, tokens in (("a", 0), ("b", 250)))
    assert_good(model.step({a: 135, b: 7}, ["swa", "hca"]))
    assert_good(model.step({b: 140, a: 1}, ["swa"]))
    assert_good(model.step({a: 1, b: 1}))


HEADS = [(record, heads) for record in ("bf16", "fp8") for heads in (1, 64, 128)]


@pytest.mark.parametrize(("record", "heads"), HEADS)
def test_heads_of_the_models(record, heads, poisoned_outputs):
    model, (a, b, c) = lived(Case(record, heads, selected=40))
    assert_good(model.step({a: 1, c: 1}))
    assert_good(model.step({a: 3, b: 2}))


@pytest.mark.parametrize("record", ["fp8", "bf16"])
def test_a_chunk_in_groups(record, poisoned_outputs):
    """Groups begin and end within requests."""
    model, (a, b, c) = lived(Case(record))
    with model.cache.step({a: [7] * 5, b: [7] * 4, c: [7] * 2}) as step:
        model.compress(step)
        view, inputs = model.view(step), model.inputs(step)
        states = model.cache.storage.pools
        before = {name: pool.clone() for name, pool in states.items()}
        for kind in ("csa", "hca"):
            found = []
            needs = {"csa": {"selected": 6}, "hca": {"entries": 2 * PAGE}}[kind]
            needs = plan_workspace(model.layout, 4, tokens=11, requests=3, longest=5, **needs)
            for count in (11, 3):
                for name, pool in states.items():
                    pool.copy_(before[name])
                model.case = replace(model.case, workspace=needs.size(count))
                found.append(model.attend(kind, inputs, view))
            assert torch.equal(*found)


@pytest.mark.parametrize("sinks", [True, False])
def test_a_window_without_keys(sinks, poisoned_outputs):
    """No token of a cache has such a window: only the past counts, and without one O is zero."""
    model, (a, b, _) = lived(replace(FP8, sinks=sinks))
    with model.cache.step({a: [7], b: [7]}) as step:
        model.compress(step)
        view, inputs = model.view(step), model.inputs(step)
        past = model.selected(inputs)
        past.chosen[1] = 0
        window = replace(view.window, lengths=torch.zeros_like(view.window.lengths))
        o = cached_attention(
            inputs.q, inputs.kv, model.cache.rows("swa", 1), window,
            rope=model.rope, sinks=model.sinks, past=past,
        )  # fmt: skip
        token = model.tokens("csa", step, inputs)[0]
    assert not o[1].any()
    alone = replace(token, near=token.near[:0])
    verdict = compare_output(o[0].double(), definition(alone), rounded(alone), BF16)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize("record", ["fp8", "bf16"])
def test_under_the_checker(record):
    model, (a, b, c) = lived(Case(record))
    with checked():
        assert_good(model.step({a: 1, c: 1}, ["csa", "whole"], padding=1))
        assert_good(model.step({a: 2, b: 1}, ["hca"]))


def test_the_reference_adds_nothing_twice():
    """Two empty pasts are the same, and a past may be a part of the window."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 512, generator=generator).bfloat16()
    keys = torch.randn(9, 512, generator=generator).bfloat16()
    rope = torch.ones(1, 32), torch.zeros(1, 32)
    whole = definition(Token(q, 0, keys, None, rope))
    for cut in (0, 4, 9):
        token = Token(q, 0, keys[:cut], keys[cut:], rope)
        assert torch.allclose(definition(token), whole, rtol=1e-12)
        assert (rounded(token).double() - whole).abs().max() < 0.02
    sink = Token(q, 0, keys, keys[:0], rope, torch.full((2,), 70.0))
    assert definition(sink).abs().max() < 1e-12
    assert torch.equal(rounded(sink), rounded(replace(sink, far=None)))


@pytest.mark.parametrize("arch", ARCHS)
def test_equal_entries_of_huge_scores_are_averaged(arch):
    """Scores are near 2^33, where an LSE cannot hold the sum: 16 entries of the window are equal,
    and those of the past score half as much."""
    x = (torch.arange(512) % 7 - 3.0).bfloat16()[None]
    rope, positions = (torch.ones(16, 32), torch.zeros(16, 32)), torch.arange(16)
    near, far = (Rows(torch.zeros(2, 16 * 1024, dtype=torch.uint8), 0, 0, 16, BF16_512)
                 for _ in range(2))  # fmt: skip
    for rows, entry in ((near, x), (far, x / 2)):
        reference.append_swa(rows, entry.expand(16, -1), positions, positions, *rope)
    arrays = {"positions": positions[15:]}
    window = see_window(arrays, positions[15:], window=16, rows=16, longest=1, context=16)
    past = Selected(far, positions[None, :6], torch.tensor([6], dtype=torch.int32))
    q = x[:, None].expand(-1, 2, -1) * torch.tensor([1.0, 4.0]).bfloat16()[:, None]
    o = cached_attention(
        q.contiguous(), x, near, window, rope=rope, past=past, scale=1e6, arch=arch
    )
    assert torch.equal(o, x[:, None].expand(-1, 2, -1))
