"""Attention by its definition in place of the kernels, with every check of their arguments: an
error can only come from the adaptor.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import fmha.reference
import gqa_lowlatency.reference
from fmha.api import fields_of as fields_of_attention
from fmha.launch import ATTENTION
from gqa_lowlatency.api import fields_of as fields_of_decode
from gqa_lowlatency.launch import DECODE
from kvcache.movement import reference
from kvcache.movement.launch import APPEND_PAGES, GATHER_PAGES
from lab.house.source import ROOT
from tests.blackwell_engines.requests import imported

LAUNCHES = ("backend", "arch", "max_seqlen_q", "max_kv_len", "out", "config")  # change no number


def _attention(rounded: Callable, operator: Any, fields_of: Callable, calls: list) -> Callable:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        return_lse = options.pop("return_lse", False)
        operator.arguments(fields_of(q, k, v, dict(options))).check()
        calls.append(operator.name)
        out, window = options["out"], options.pop("window", None)
        options = {
            name: value for name, value in options.items()
            if value is not None and name not in LAUNCHES
        }  # fmt: skip
        if window is not None:
            sides = (window, None) if isinstance(window, int) else window
            options["window"] = sides if operator is ATTENTION else window
        if out.dtype == torch.float8_e4m3fn:
            options["out_dtype"] = out.dtype
        found = rounded(q, k, v, **options)
        out.copy_(found.o)
        return (out, found.lse.float()) if return_lse else out

    return call


def _append(calls: list) -> Callable:
    def call(k_pages: Any, v_pages: Any, k: Any, v: Any, slots: Any, **options: Any) -> None:
        given = {"k_pages": k_pages, "v_pages": v_pages, "k": k, "v": v, "slots": slots}
        APPEND_PAGES.arguments(given | options).check()
        calls.append("append")
        reference.append_pages(k_pages, k, slots, options.get("k_scale"))
        reference.append_pages(v_pages, v, slots, options.get("v_scale"))

    return call


def _gather(calls: list) -> Callable:
    def call(k_pages: Any, v_pages: Any, slots: Any, k: Any, v: Any, **options: Any) -> None:
        given = {"k_pages": k_pages, "v_pages": v_pages, "k": k, "v": v, "slots": slots}
        GATHER_PAGES.arguments(given | options).check()
        calls.append("gather")
        reference.gather_pages(k_pages, slots, k)
        reference.gather_pages(v_pages, slots, v)

    return call


def _merge(calls: list) -> Callable:
    def call(parts: list, sinks: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append("merge")
        lses = [lse.double() for _, lse in parts]
        total = torch.stack(lses if sinks is None else [*lses, sinks[:, None].expand_as(lses[0])])
        lse = total.logsumexp(0)
        o = sum(
            o.double().nan_to_num() * (part - lse).exp().T[..., None]
            for (o, _), part in zip(parts, lses, strict=True)
        )
        return o.to(parts[0][0].dtype), lse.float()

    return call


@pytest.fixture
def engines_by_definition(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace kernels below the engines' adaptors by definitions. Returns the names of the
    launches.
    """
    from blackwell_engines.engines import attend
    from blackwell_engines.vllm import cache, context

    calls: list[str] = []
    sides = (
        ("attention", fmha.reference, ATTENTION, fields_of_attention),
        ("decode", gqa_lowlatency.reference, DECODE, fields_of_decode),
    )
    for name, by, operator, fields_of in sides:
        made = _attention(by.rounded, operator, fields_of, calls)
        monkeypatch.setattr(attend, name, made)
    monkeypatch.setattr(attend, "gather_pages", _gather(calls))
    monkeypatch.setattr(cache, "append_pages", _append(calls))
    monkeypatch.setattr(context, "merge", _merge(calls))
    return calls


@pytest.fixture
def plugin(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The backend for the engine that the folder of the test is named after."""
    engine = f"tests.blackwell_engines.{request.path.parent.name}.engine"
    with imported(importlib.import_module(engine)) as module:
        yield module


@pytest.fixture(scope="session")
def pyproject() -> dict:
    """Parse the project's declaration; skip before Python 3.11, which cannot read it."""
    tomllib = pytest.importorskip("tomllib")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
