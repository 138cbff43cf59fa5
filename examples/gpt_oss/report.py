"""Report of a run: tokens per second, memory, and on a GPU the time of each kernel."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from examples.gpt_oss.compare import Comparison
from examples.gpt_oss.engine import DECODE, PREFILL, Engine, Took
from kernelkit.compile.names import stem_of

# Beginnings of kernel names -> packages.
OURS = {
    "fmha": "fmha", "gqa": "gqa_lowlatency", "moe": "moe", "kvcache": "kvcache", "few": "example",
}  # fmt: skip
SHOWN = 24  # kernels of the table; the others are one row
GIB = 1 << 30


@dataclass(frozen=True)
class Rate:
    """Steps of a kind: tokens in a second, and the median milliseconds of a step."""

    steps: int
    tokens: int
    tokens_per_second: float
    milliseconds: float


@dataclass(frozen=True)
class Kernel:
    """Launches of one kernel in all profiled steps. package: one of ours, or 'torch'."""

    name: str
    package: str
    launches: int
    microseconds: float


def rates(took: Sequence[Took]) -> dict[str, Rate]:
    """Return the rate of each kind of step that occurred."""
    found = {}
    for kind in (PREFILL, DECODE):
        steps = [each for each in took if each.kind == kind]
        if steps:
            seconds, tokens = sum(each.seconds for each in steps), sum(x.tokens for x in steps)
            middle = sorted(each.seconds for each in steps)[len(steps) // 2]
            found[kind] = Rate(len(steps), tokens, tokens / seconds, 1000 * middle)
    return found


def memory(engine: Engine) -> dict[str, int]:
    """Bytes of the weights and of the cache; on a GPU also the most that torch had in use."""
    found = {"weights": engine.model.weights.nbytes, "cache": engine.kept.nbytes}
    if engine.model.device.type == "cuda":
        found["most in use"] = torch.cuda.max_memory_allocated(engine.model.device)
    return found


def profiled(run: Callable[[], Any]) -> tuple[list[Kernel], float]:
    """The kernels of a run on a GPU, those that take longest first, and the microseconds in which
    one of them at least was running: less than their sum where some overlap."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        run()
        torch.cuda.synchronize()
    found: dict[str, Kernel] = {}
    spans = []
    for event in profiler.events():
        if event.device_type.name != "CUDA":
            continue
        before = found.get(event.name, Kernel(event.name, package_of(event.name), 0, 0.0))
        spent = before.microseconds + event.self_device_time_total
        found[event.name] = Kernel(event.name, before.package, before.launches + 1, spent)
        spans.append((event.time_range.start, event.time_range.end))
    kernels = sorted(found.values(), key=lambda kernel: -kernel.microseconds)
    return kernels, covered(spans)


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """The length of the union of spans (begin, end)."""
    whole, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        whole += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return whole


def package_of(name: str) -> str:
    """Return the package of ours that a kernel comes from, by its name, or 'torch'."""
    stem = stem_of(name) or ""
    return next((package for word, package in OURS.items() if stem.startswith(word)), "torch")


def short(name: str) -> str:
    """Shorten a kernel's name for a table."""
    return re.sub(r"\s+", " ", name)[:70]


def kernel_table(kernels: Sequence[Kernel], steps: int, busy: float) -> list[str]:
    """Return lines with each kernel's share, launches and microseconds per step, and package.

    busy: see `profiled`.
    """
    whole = sum(kernel.microseconds for kernel in kernels) or 1.0
    shares: dict[str, float] = {}
    for kernel in kernels:
        shares[kernel.package] = shares.get(kernel.package, 0.0) + kernel.microseconds / whole
    rest = kernels[SHOWN:]
    rows = [*kernels[:SHOWN]]
    if rest:
        spent = sum(kernel.microseconds for kernel in rest)
        count = sum(kernel.launches for kernel in rest)
        rows.append(Kernel(f"{len(rest)} others", "", count, spent))
    lines = ["  share  launches      us  of              kernel"]
    for kernel in rows:
        each = f"{kernel.launches / steps:8.1f} {kernel.microseconds / steps:8.1f}"
        lines.append(
            f"{kernel.microseconds / whole:7.1%}  {each}  {kernel.package:15} {short(kernel.name)}"
        )
    ours = sum(share for package, share in shares.items() if package != "torch")
    parts = ", ".join(f"{package} {share:.1%}" for package, share in sorted(shares.items()))
    sums = f"{whole / steps / 1000:.3f} ms of kernels a step, {busy / steps / 1000:.3f} ms busy"
    return [*lines, f"ours: {ours:.1%} ({parts}); {sums}"]


def speed_lines(found: dict[str, Rate], timed: bool) -> list[str]:
    """Return a line for each kind of step. timed: whether times are a GPU's, not an emulator's."""
    lines = []
    for kind, rate in found.items():
        line = f"{kind}: {rate.tokens} tokens in {rate.steps} steps"
        if timed:
            line += f", {rate.tokens_per_second:,.1f} tokens/s, {rate.milliseconds:.2f} ms a step"
        lines.append(line)
    return lines


def memory_line(found: dict[str, int]) -> str:
    """Return a line with each size in GiB."""
    return "memory: " + ", ".join(f"{name} {size / GIB:.3f} GiB" for name, size in found.items())


def comparison_lines(found: Comparison, ours: dict[str, Rate], timed: bool) -> list[str]:
    """Return lines that compare logits, tokens and, if timed, speed with transformers'."""
    rounding = "none, MXFP4 holds the experts as they are"
    if found.rounding is not None:
        rounding = str(found.rounding)
    lines = [
        f"logits beside transformers': {found.logits}",
        f"error of quantising the experts: {rounding}",
        f"greedy tokens as transformers', before the first other one: {list(found.greedy)}",
    ]
    if found.margin is not None:
        lines.append(f"where one differs, its own logit is larger by {found.margin:.4f} at most")
    for kind, theirs in zip((PREFILL, DECODE), found.rates, strict=True):
        if timed and kind in ours and theirs:
            times = ours[kind].tokens_per_second / theirs
            lines.append(f"transformers' {kind}: {theirs:,.1f} tokens/s; ours is {times:.2f} x")
    return lines


def document(engine: Engine, **parts: Any) -> dict[str, Any]:
    """Return everything in a form for json."""
    found: dict[str, Any] = {"model": engine.model.config.name}
    device = engine.model.device
    on_gpu = device.type == "cuda"
    found["device"] = torch.cuda.get_device_name(device) if on_gpu else "emulator"
    found["torch"] = torch.__version__
    for name, part in parts.items():
        found[name] = _plain(part)
    return found


def _plain(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: _plain(each) for name, each in part.items()}
    if isinstance(part, list | tuple):
        return [_plain(each) for each in part]
    return asdict(part) if hasattr(part, "__dataclass_fields__") else part
