"""Tiny models of examples/gpt_oss and of transformers with equal weights; kernels by definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

import fmha.reference
import gqa_lowlatency.reference
import moe.reference_routing
from examples.gpt_oss import cache, experts
from examples.gpt_oss.compare import transformers_model
from examples.gpt_oss.config import named
from examples.gpt_oss.engine import Engine, Job
from examples.gpt_oss.few import forward as few
from examples.gpt_oss.few import reference as few_reference
from examples.gpt_oss.model import Model
from examples.gpt_oss.weights import Drawn, load
from kvcache.memory import storage
from kvcache.movement import reference

TINY = named("tiny")
ROOM = 64  # tokens of a request
NEW = 5


def tiny(kind: str, dtype: torch.dtype, device: str = "cpu", **drawn: Any) -> tuple[Model, Any]:
    """Make a model of random weights, and transformers' model of the same numbers, in fp32 or
    bf16.
    """
    source = Drawn(TINY, torch.device(device), **drawn)
    model = Model(TINY, load(TINY, source, experts=kind, dtype=dtype), ROOM)
    return model, transformers_model(model, source)


def prompts(lengths: Sequence[int], seed: int = 3) -> list[list[int]]:
    """Random prompts; the last one shares its first tokens (two blocks of 16 and more) with the one
    before it.
    """
    numbers = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(0, 96, (length,), generator=numbers).tolist() for length in lengths]
    return [*drawn, [*drawn[-1][:35], 1, 2, 3]]


def served(model: Model, given: Sequence[Sequence[int]], **options: Any) -> list[Job]:
    """Serve prompts and return the finished jobs; the engine's bookkeeping is checked, and is empty
    at the end.
    """
    engine = Engine(model, tokens=ROOM, **options)
    jobs = [engine.submit(f"request {n}", prompt, NEW) for n, prompt in enumerate(given)]
    while engine.step():
        engine.kept.cache.manager.check()
    assert not engine.kept.cache.manager.requests
    return jobs


def alone(model: Model, given: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the tokens of each prompt, served alone in a new engine."""
    jobs = [served(model, [prompt], requests=1, share=False)[0] for prompt in given]
    return [job.found for job in jobs]


def defined(definition: Callable) -> Callable:
    """Wrap a definition of attention, in fp64, as the function that the example calls."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        for of_launches in ("max_seqlen_q", "pdl"):
            options.pop(of_launches, None)
        return definition(q, k, v, **options).o.to(q.dtype)

    return call


def by_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace every kernel that the example launches by its definition; nothing compiles."""

    def append_rows(first: Any, second: Any, slots: torch.Tensor) -> None:
        reference.append_rows([first, second], slots)

    def combine(y: torch.Tensor, *weights_and_rows: torch.Tensor) -> torch.Tensor:
        return moe.reference_routing.combine(y, *weights_and_rows).to(y.dtype)

    def route_tokens(
        x: torch.Tensor, linear: moe.RouterLinear, router: moe.Router
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.nn.functional.linear(x, linear.weight, linear.bias)
        return moe.reference_routing.route(logits, **vars(router))

    def copy_slots(*pools_and_tables: torch.Tensor, **_: Any) -> None:
        reference.copy_slots(*pools_and_tables)

    changes: dict[ModuleType, dict[str, Callable]] = {
        cache: {
            "attention": defined(fmha.reference.definition),
            "decode": defined(gqa_lowlatency.reference.definition),
            "append_rows": append_rows,
            "gather": reference.gather,
        },
        experts: {
            "route_tokens": route_tokens,
            "permutation": moe.reference_routing.permutation,
            "combine": combine,
        },
        storage: {"copy_slots": copy_slots},
        few: {
            name: getattr(few_reference, name)
            for name in ("attention_input", "attention_output", "add_norm", "most_likely")
        },
    }
    for module, functions in changes.items():
        for name, function in functions.items():
            monkeypatch.setattr(module, name, function)
