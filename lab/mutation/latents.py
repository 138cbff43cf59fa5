"""Launches of attention to latent keys, and of the rows between its projections, for mutants."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from lab.mutation.subject import Results, Subject
from lab.problems.latent import Cache as Entries
from lab.problems.latent import Dense, Sparse
from mla.attention.api import decode as attend
from mla.attention.api import sparse_decode
from mla.glue.api import LatentKeys, LowRank, Queries, norm_rope_append


def _latent(arch: str, case: Dense | Sparse, sms: int = 132, **options: Any) -> Subject:
    """Return a call as a subject.

    sms: of the GPU that the launch is chosen for.
    options: arguments that change no result.
    """
    inputs = functools.cache(case.inputs)  # not yet

    def launched() -> Results:
        given, others = inputs()
        function = attend if isinstance(case, Dense) else sparse_decode
        with mock.patch("mla.attention.choose.sms_for", return_value=sms):
            return function(*given, return_lse=True, arch=arch, **others, **options)

    return Subject(launched)


LONG = Dense(heads=20, tokens=2, page=16, lens=(300, 20), sinks=True, amplitude=4.0)
PAGED = replace(LONG, heads=70, tokens=1, page=64, lens=(700, 40))  # two row tiles, by TMA
LONGER = replace(PAGED, lens=(1300, 40))  # ten tiles for each of two CTAs
LISTS = Sparse(heads=12, tokens=2, cache=Entries("fp8_584", 32, 330, counts=(330, 7)),
               extra=Entries("fp4_288", 5, 40), rope=True, sinks=True, amplitude=4.0)  # fmt: skip
FILLED = replace(LISTS, cache=Entries("fp8_584", 32, 900, counts=(900, 7)))
HALVED = Sparse(heads=12, tokens=1, cache=Entries("fp8_656", 8, 650, spread=24), amplitude=4.0)
PLAIN = Sparse(heads=12, tokens=2, cache=Entries("tensor", 16, 300), amplitude=4.0)
# Row tiles that cross, in units one after the other.
WIDE = Sparse(heads=70, tokens=3, cache=Entries("fp8_656", 8, 200, counts=(200, 0, 70)),
              amplitude=4.0)  # fmt: skip


def _rows_of_latents() -> Results:
    """Norm, RoPE, records and append of a V3.2 layer's rows."""
    tokens, heads = 5, 3
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(64, 32, generator=generator) * 6.0
    rope, positions = (angles.cos(), angles.sin()), torch.tensor([5, 6, 0, 9, 9])
    slots = torch.tensor([21, 22, -1, 3, 40])
    cache = torch.zeros(4, 16, 576).bfloat16()
    kv, q_a, q = (
        torch.randn(tokens, *size, generator=generator).bfloat16()
        for size in ((576,), (1536,), (heads, 192))
    )
    absorbed = torch.zeros(tokens, heads, 576).bfloat16()
    norm_rope_append(
        positions,
        rope,
        low_rank=LowRank(q_a, torch.ones(1536)),
        keys=LatentKeys(kv, cache, slots, torch.ones(512)),
        queries=Queries(q, absorbed),
        arch="sm_90a",
    )
    return q_a, cache, absorbed


LATENT: dict[str, Subject] = {
    "latent warps": _latent("sm_89", LONG, parts=2),
    "latent warps, records": _latent("sm_89", LISTS, parts=2),
    # Five tiles of a CTA at least: buffers come round.
    "latent wgmma": _latent("sm_90a", PAGED, kernel="wgmma", cluster=1, parts=1),
    "latent wgmma, cluster": _latent("sm_90a", LONGER, kernel="wgmma", cluster=2, parts=1),
    "latent wgmma, records": _latent("sm_90a", LISTS, kernel="wgmma", cluster=1, parts=1),
    "latent wgmma, records, cluster": _latent(
        "sm_90a", FILLED, sms=16, kernel="wgmma", cluster=2, parts=2
    ),
    "latent wgmma, listed bf16": _latent("sm_90a", PLAIN, kernel="wgmma", cluster=1, parts=1),
    "latent wgmma, fp16": _latent("sm_90a", HALVED, kernel="wgmma", cluster=1, parts=1),
    "latent wgmma, crossing": _latent("sm_90a", WIDE, sms=2, kernel="wgmma"),
    "latent tcgen05": _latent("sm_100a", PAGED, cluster=2),
    "latent tcgen05, records": _latent("sm_100a", LISTS, cluster=2, parts=2),
    "latent tcgen05, listed bf16": _latent("sm_100a", PLAIN, cluster=1, parts=1),
    "latent rows": Subject(_rows_of_latents),
}
