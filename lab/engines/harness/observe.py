"""`install`: a plugin of both engines that records what our adapters do, and can plant a fault.

BLACKWELL_HARNESS names a folder: each process appends lines of JSON to a file of its own there, one
for each call of `attend`, one for each kernel that is compiled. BLACKWELL_FAULT names a fault of
`FAULTS`: tests plant it to show that a comparison notices it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

FOLDER, FAULT = "BLACKWELL_HARNESS", "BLACKWELL_FAULT"


def install() -> None:
    """Wrap what the adapters call. An engine may call it more than once in a process."""
    from blackwell_engines.engines import attend as module
    from kernelkit.compile import compiler

    if getattr(module.attend, "is_observed", False):
        return
    if os.environ.get(FAULT):
        _planted(module, FAULTS[os.environ[FAULT]])
    if os.environ.get(FOLDER):
        _record_attention(module)
        _record_compiled(compiler)
    module.attend.is_observed = True


def say(**what: Any) -> None:
    """Append a line to the file of this process."""
    folder = Path(os.environ[FOLDER])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
        print(json.dumps({"time": time.time(), **what}), file=file)


def read(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of all processes, in the order of their time."""
    lines = [
        json.loads(line)
        for path in folder.glob("*.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return sorted(lines, key=lambda line: line["time"])


def _record_attention(module: Any) -> None:
    inner = module.attend

    def attend(
        step: Any, q: Any, pages: Any, out: Any, scores: Any, *rest: Any, **named: Any
    ) -> None:
        say(
            what="attend", requests=step.requests, tokens=step.tokens, rest=step.rest,
            keys=step.seq_lens.tolist(), dtype=str(pages[0].dtype), page_size=pages[0].shape[1],
            q_heads=q.shape[1], window=scores.window, softcap=scores.softcap,
            sinks=scores.sinks is not None, gathered=step.gathered is not None,
            k_scale=None if scores.k_scale is None else scores.k_scale.tolist(),
            v_scale=None if scores.v_scale is None else scores.v_scale.tolist(),
            causal=getattr(step, "causal", True), fresh=bool(rest and rest[0] is not None),
        )  # fmt: skip
        return inner(step, q, pages, out, scores, *rest, **named)

    module.attend = attend


def _record_compiled(compiler: Any) -> None:
    inner = compiler._compile

    def compile_(key: Any, *rest: Any, **named: Any) -> Any:
        say(what="compile", kernel=str(key)[:300])
        return inner(key, *rest, **named)

    compiler._compile = compile_


# ---- faults


def _planted(module: Any, change: Callable[[Any, Any, Any], tuple[Any, Any]]) -> None:
    """Have `attend` get (step, scores) as `change` returns them for (step, pages, scores)."""
    inner = module.attend

    def attend(
        step: Any, q: Any, pages: Any, out: Any, scores: Any, *rest: Any, **named: Any
    ) -> None:
        step, scores = change(step, pages, scores)
        return inner(step, q, pages, out, scores, *rest, **named)

    module.attend = attend


def _no_window(step: Any, pages: Any, scores: Any) -> tuple[Any, Any]:
    return step, replace(scores, window=None)


def _swapped_scales(step: Any, pages: Any, scores: Any) -> tuple[Any, Any]:
    return step, replace(scores, k_scale=scores.v_scale, v_scale=scores.k_scale)


def _wrong_slot(step: Any, pages: Any, scores: Any) -> tuple[Any, Any]:
    """Every decoded token finds its newest key in the row of another."""
    if not step.requests:
        return step, scores
    table = step.table.clone()
    for row, keys in zip(range(table.shape[0]), step.seq_lens.tolist(), strict=False):
        last = (keys - 1) // pages[0].shape[1]
        table[row, last] = table[row, max(last - 1, 0)] if last else 0
    return replace(step, table=table), scores


FAULTS: dict[str, Callable[[Any, Any, Any], tuple[Any, Any]]] = {
    "window": _no_window, "scale": _swapped_scales, "slot": _wrong_slot,
}  # fmt: skip
