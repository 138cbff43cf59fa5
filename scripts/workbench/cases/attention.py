"""One attention problem, its inputs, and its run on a backend: what the fmha scripts share."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any

import torch

from fmha.api import attention
from fmha.arguments import Arguments
from fmha.config import TUNABLE, AttentionConfig
from fmha.forward import choose_config
from fmha.plan import AttentionPlan, make_plan
from kernelkit.launch import emulation
from ptxemu import LaunchReport, Options

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OUT_DTYPES = DTYPES | {"fp32": torch.float32}
SEED = 0
POOL_SPARE = 1  # pages of the pool that belong to no entry

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """q [batch, sq, q_heads, head_dim]; k, v [batch, skv, kv_heads, ...].

    v_head_dim: 0 for head_dim. packed: '', 'q', 'k' or 'qk', whose entries then have lengths
    from 1 / batch of the longest up to it, one behind the other. kv_lens: of every entry, or one
    for all. page_size: keys lie in shuffled pages. out_dtype: '' for the default. tuning: tunable
    fields of the config by name. The rest is as in `fmha.attention`.
    """

    batch: int
    sq: int
    skv: int
    q_heads: int
    kv_heads: int
    head_dim: int = 64
    v_head_dim: int = 0
    dtype: str = "bf16"
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    sink_tokens: int = 0
    q_offset: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    kv_lens: tuple[int, ...] = ()
    packed: str = ""
    page_size: int = 0
    rope_dim: int = 0
    raw: bool = False
    out_dtype: str = ""
    pack_heads: bool | None = None
    pdl: bool = False
    tuning: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        heads = f"{self.q_heads}/{self.kv_heads}"
        dims = f"{self.head_dim}" + f",{self.v_head_dim}" * bool(self.v_head_dim)
        return " ".join(
            [f"{self.sq}x{self.skv} h{heads} b{self.batch} d{dims} {self.dtype}", *self.features()]
        )

    def features(self) -> Iterator[str]:
        """A word for each option that is not at its default."""
        left, right = ("" if size is None else size for size in self.window)
        words = {
            "causal": self.causal,
            f"window({left},{right})": self.window != (None, None),
            f"sink-tokens({self.sink_tokens})": self.sink_tokens,
            f"q-offset({self.q_offset})": self.q_offset is not None,
            f"softcap({self.softcap:g})": self.softcap,
            "sinks": self.sinks,
            f"kv-lens({','.join(map(str, self.kv_lens))})": self.kv_lens,
            f"packed-{self.packed}": self.packed,
            f"pages({self.page_size})": self.page_size,
            f"rope({self.rope_dim})": self.rope_dim,
            "raw": self.raw,
            f"-> {self.out_dtype}": self.out_dtype,
            f"pack-heads({self.pack_heads})": self.pack_heads is not None,
            "pdl": self.pdl,
        }
        yield from (word for word, wanted in words.items() if wanted)
        yield from (f"{name}({value})" for name, value in self.tuning.items())

    def lengths(self, side: str, longest: int) -> list[int]:
        """Rows of each entry of q or k."""
        if side not in self.packed:
            return [longest] * self.batch
        return [-(-longest * (entry + 1) // self.batch) for entry in range(self.batch)]

    def inputs(self, device: str = "cpu") -> Inputs:
        """q, k, v: standard normal, the same numbers on every device; 'meta' has none."""
        generator = torch.Generator().manual_seed(SEED)
        q_rows: tuple[int, ...] = (self.batch, self.sq)
        k_rows: tuple[int, ...] = (self.batch, self.skv)
        if "q" in self.packed:
            q_rows = (sum(self.lengths("q", self.sq)),)
        if self.page_size:
            k_rows = (self.batch * self.pages + POOL_SPARE, self.page_size)
        elif "k" in self.packed:
            k_rows = (sum(self.lengths("k", self.skv)),)
        shapes = (
            (*q_rows, self.q_heads, self.head_dim),
            (*k_rows, self.kv_heads, self.head_dim),
            (*k_rows, self.kv_heads, self.v_head_dim or self.head_dim),
        )
        if device == "meta":
            return tuple(torch.empty(s, device="meta", dtype=DTYPES[self.dtype]) for s in shapes)
        return tuple(
            torch.randn(shape, generator=generator).to(device, DTYPES[self.dtype])
            for shape in shapes
        )

    @property
    def pages(self) -> int:
        """Pages of an entry."""
        return -(-self.skv // self.page_size) if self.page_size else 0

    def tables(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Integer tables and learned logits, by the names of `fmha.attention`."""
        generator = torch.Generator().manual_seed(SEED)
        found: dict[str, torch.Tensor] = {}
        for side, longest in (("q", self.sq), ("k", self.skv)):
            if side in self.packed:
                starts = [0, *accumulate(self.lengths(side, longest))]
                found[f"cu_seqlens_{side}"] = torch.tensor(starts, dtype=torch.int32)
        lens = self.kv_lens or ((self.skv,) if self.page_size else ())
        if lens:
            lens = lens * self.batch if len(lens) == 1 else lens
            found["kv_lens"] = torch.tensor(lens, dtype=torch.int32)
        if self.page_size:
            order = torch.randperm(self.batch * self.pages, generator=generator)
            found["page_table"] = order.view(self.batch, self.pages).int()
        if self.sinks:
            found["sinks"] = torch.randn(self.q_heads, generator=generator)
        return {name: table.to(device) for name, table in found.items()}

    def rope(self, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) for every position up to the last query's."""
        positions = max(self.skv, (self.q_offset or 0) + self.sq, 1)
        frequencies = 10000.0 ** -(torch.arange(0, self.rope_dim, 2) / max(self.rope_dim, 1))
        angles = torch.arange(positions)[:, None] * frequencies
        return angles.cos().to(device), angles.sin().to(device)

    def options(self, device: str = "cpu") -> dict[str, Any]:
        """Keyword arguments of `fmha.attention` that change its result, as the reference takes."""
        options: dict[str, Any] = {
            "causal": self.causal,
            "window": self.window,
            "sink_tokens": self.sink_tokens,
            "softcap": self.softcap,
            "q_offset": self.q_offset,
            "normalize": not self.raw,
            "out_dtype": OUT_DTYPES.get(self.out_dtype),
            **self.tables(device),
        }
        return options | ({"rope": self.rope(device)} if self.rope_dim else {})

    def launch_options(self) -> dict[str, Any]:
        """Those that do not."""
        options: dict[str, Any] = {"pack_heads": self.pack_heads, "pdl": self.pdl}
        if "q" in self.packed:
            options["max_seqlen_q"] = self.sq
        return options

    def arguments(self, device: str) -> Arguments:
        """What the operator gets; on 'meta' there is nothing to compute, only to plan."""
        options = self.options(device) | self.launch_options() | self.tuning
        options["window_left"], options["window_right"] = options.pop("window")
        options["cos"], options["sin"] = options.pop("rope", (None, None))
        if self.q_offset is not None:
            options["q_offset"] = torch.full((self.batch,), self.q_offset, dtype=torch.int32)
        tensors = {name: v for name, v in options.items() if isinstance(v, torch.Tensor)}
        options |= {name: tensor.to(device) for name, tensor in tensors.items()}
        return Arguments(*self.inputs(device), **options)


def case_of(options: argparse.Namespace, of_shape: tuple[int, ...] | None = None) -> Case:
    """The case that the flags spell, with another shape where one is given."""
    names = {one.name for one in fields(Case)} - {"head_dim", "tuning"}
    values = {name: value for name, value in vars(options).items() if name in names}
    values["head_dim"], values["v_head_dim"] = options.head_dim
    default = AttentionConfig()
    values["tuning"] = {
        name: getattr(options, name)
        for name in TUNABLE
        if getattr(options, name) != getattr(default, name)
    }
    return Case(*(of_shape or options.shape), **values)


def check(case: Case) -> None:
    """Raise ValueError or NotImplementedError for a case that `attention` refuses."""
    case.arguments("cpu").check()
    plan_of(case)


def attend(
    case: Case, backend: str, options: Options
) -> tuple[tuple[torch.Tensor, torch.Tensor], list[LaunchReport]]:
    """((O normalised, LSE), the emulator's launch reports); backend 'cuda' or 'emulate'.

    On a GPU the launch stands in an NVTX range of the case's name.
    """
    device = "cuda" if backend == "cuda" else "cpu"
    inputs, arguments = case.inputs(device), case.options(device) | case.launch_options()
    config = AttentionConfig(**case.tuning)
    options = replace(options, roles=role_of_warp(case))
    with emulation(options) as emulated, _nvtx(str(case), backend):
        results = attention(*inputs, return_lse=True, backend=backend, config=config, **arguments)
    if backend == "cuda":
        torch.cuda.synchronize()
    o, lse = results[:2]
    if case.raw:
        # (-inf) - (-inf) is NaN where no key was seen; O is 0 there.
        total = torch.exp(lse - results[2]).nan_to_num(nan=1.0)
        o = o.float() / total.transpose(-1, -2)[..., None]
    return (o, lse), [launch for report in emulated.reports for launch in report.launches]


@contextmanager
def _nvtx(name: str, backend: str) -> Iterator[None]:
    if backend != "cuda":
        yield
        return
    with torch.cuda.nvtx.range(name):
        yield


def config_of(case: Case) -> AttentionConfig:
    """What `attention` compiles for the case; not checked yet."""
    return choose_config(case.arguments("meta"))


def plan_of(case: Case) -> AttentionPlan:
    """The checked plan of the config that `attention` chooses for the case."""
    return make_plan(config_of(case))


def role_of_warp(case: Case) -> dict[int, str]:
    """Warp index -> name of its role, in the order of the plan."""
    return {
        warp: role.name
        for role in plan_of(case).roles.roles
        for warp in range(role.first_warp, role.first_warp + role.warps)
    }


def instructions_by_role(case: Case, launches: list[LaunchReport]) -> dict[str, int]:
    """Warp-instructions of all launches per role; empty where nothing was emulated."""
    counts: dict[str, int] = {}
    for warp, role in role_of_warp(case).items() if launches else ():
        executed = sum(launch.by_warp.get(warp, Counter()).total() for launch in launches)
        counts[role] = counts.get(role, 0) + executed
    return counts
