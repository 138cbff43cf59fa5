"""One decode problem, from its flags to what is compiled for it: what the gqa scripts share."""

from __future__ import annotations

import argparse
import dataclasses
from functools import cached_property
from typing import Any

import torch

from gqa_lowlatency.api import fields_of
from gqa_lowlatency.arguments import Arguments
from gqa_lowlatency.config import TUNABLE, DecodeConfig
from gqa_lowlatency.launch import checked_decision
from gqa_lowlatency.portable.plan import Plan90
from gqa_lowlatency.sm100 import plan as sm100
from kernelkit.call.launch import Target
from kernelkit.compile.arch import written_for
from lab.tools.place import is_of, native_arch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OUT_DTYPES = DTYPES | {"fp32": torch.float32}
KV_DTYPES = DTYPES | {"e4m3": torch.float8_e4m3fn}
SEED = 0
SPARE_PAGES = 1  # pages of the pool that belong to no entry

# Flags that are fields of Case, and those that are options of `decode`, by their names there.
FIELDS = (
    *("batch", "kv_len", "kv_heads", "q_heads", "q_len", "head_dim", "dtype", "kv_dtype"),
    *("page_size", "sinks", "scales", "arch"),
)
OPTIONS = (
    *("causal", "window", "sink_tokens", "softcap", "batch_invariant", "parts", "pdl"),
    "kv_ready_before_pdl",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """What the flags spell, by their names; kv_len has one length or one for each entry."""

    batch: int
    kv_len: tuple[int, ...]
    kv_heads: int
    q_heads: int
    q_len: int
    head_dim: int
    dtype: str
    kv_dtype: str
    page_size: int
    sinks: bool
    scales: bool
    arch: str
    options: dict[str, Any]
    tuning: dict[str, int]

    def __str__(self) -> str:
        lengths, heads = ",".join(map(str, self.kv_len)), f"h{self.q_heads}/{self.kv_heads}"
        words = [f"{self.q_len}x{lengths} {heads} b{self.batch}"]
        words += [f"d{self.head_dim} {self.dtype}" + f"/{self.kv_dtype}" * bool(self.kv_dtype)]
        words += [f"pages({self.page_size})"] * bool(self.page_size) + ["sinks"] * self.sinks
        words += ["scales"] * self.scales + ["full"] * (not self.options["causal"])
        plain = {**self.options, **self.tuning, "causal": None}
        words += [f"{name}({value})" for name, value in plain.items() if value]
        return " ".join(words)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Keys of each entry."""
        return self.kv_len * self.batch if len(self.kv_len) == 1 else self.kv_len

    @property
    def pages(self) -> int:
        """Of an entry."""
        return -(-max(self.lengths, default=0) // self.page_size)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of q, and of k and v."""
        rows: tuple[int, ...] = (self.batch, max(self.lengths, default=0))
        if self.page_size:
            rows = (self.batch * self.pages + SPARE_PAGES, self.page_size)
        q = self.batch, self.q_len, self.q_heads, self.head_dim
        return q, (*rows, self.kv_heads, self.head_dim)

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        return DTYPES[self.dtype], KV_DTYPES[self.kv_dtype or self.dtype]

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v, standard normal."""
        generator = torch.Generator().manual_seed(SEED)
        (q, kv), (q_dtype, kv_dtype) = self.shapes, self.dtypes
        queries = torch.randn(q, generator=generator)
        k, v = (torch.randn(kv, generator=generator).to(kv_dtype) for _ in range(2))
        return queries.to(q_dtype), k, v

    @cached_property
    def tables(self) -> dict[str, torch.Tensor]:
        """Lengths, page numbers, sinks and scales, by the names of `decode`."""
        generator = torch.Generator().manual_seed(SEED)
        found = {}
        if self.page_size or len(self.kv_len) > 1:
            found["kv_lens"] = torch.tensor(self.lengths, dtype=torch.int32)
        if self.page_size:
            order = torch.randperm(self.batch * self.pages, generator=generator)
            found["page_table"] = order.view(self.batch, self.pages).int()
        if self.sinks:
            found["sinks"] = torch.randn(self.q_heads, generator=generator)
        for name in ("k_scale", "v_scale") if self.scales else ():
            found[name] = torch.rand(self.kv_heads, generator=generator) + 0.5
        return found

    def without_memory(self) -> Arguments:
        """What `decode` gets, tensors without contents: enough to be checked and planned for."""
        q, k = (
            torch.empty(shape, dtype=dtype, device="meta")
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )
        tables = {name: table.to("meta") for name, table in self.tables.items()}
        return Arguments(**fields_of(q, k, k, tables | self.options), **self.tuning)


def case_of(arguments: argparse.Namespace) -> Case:
    """The case that the flags spell; ValueError for lengths that do not fit the batch."""
    options = {name: getattr(arguments, name) for name in OPTIONS}
    left, right = arguments.window
    options["window"] = left if right in (None, 0) else arguments.window
    options["out_dtype"] = OUT_DTYPES.get(arguments.out_dtype)
    tuning = {name: getattr(arguments, name) for name in TUNABLE}
    case = Case(
        **{name: getattr(arguments, name) for name in FIELDS},
        options=options,
        tuning={name: value for name, value in tuning.items() if value is not None},
    )
    if case.kv_dtype not in ("", case.dtype, "e4m3"):
        raise ValueError(f"--kv-dtype {case.kv_dtype} with --dtype {case.dtype}: the same, or e4m3")
    if len(case.lengths) != case.batch:
        raise ValueError(
            f"--kv-len {case.kv_len} for --batch {case.batch} entries: one length, or as many"
        )
    return case


def settled(case: Case) -> tuple[Arguments, DecodeConfig]:
    """The problem, and what is compiled for it: on this machine, where its GPU is of case.arch.

    Raises what `decode` raises, without a look at the contents of tensors.
    """
    arguments, native = case.without_memory(), native_arch()
    arguments.check()
    backend = "cuda" if native and is_of(native, case.arch) else "emulate"
    return arguments, checked_decision(arguments, Target(backend, case.arch)).config


@dataclasses.dataclass(frozen=True)
class Cta:
    """What a CTA is and takes, on any architecture; tile: keys that it takes at a time."""

    plan: Plan90 | sm100.Plan100
    tile: int
    threads: int
    stages: int
    smem_bytes: int


def cta_of(config: DecodeConfig, arch: str) -> Cta:
    """Of the kernel for `arch`."""
    if written_for(arch) == "sm_100a":
        wide = sm100.Plan100(config)
        return Cta(wide, sm100.TILE, sm100.ROLES.threads, wide.stages, wide.smem.bytes)
    plan = Plan90(config, arch)
    return Cta(plan, plan.tile, plan.threads, plan.slots, plan.smem_bytes)
