"""The kernels of decode, and the merge of parts, whose mutants are judged: shares of several tiles,
so that rings come round, maxima that move, NaN past the lengths, an entry without keys."""

from __future__ import annotations

from typing import Any

import torch

from gqa_lowlatency import DecodeConfig, decode, merge
from lab.mutation.subject import Results, Subject

LENGTHS, ROWS, HEAD_DIM, HEADS = (700, 0, 130), 768, 64, 4


def _cache(page_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """K and V; NaN past the lengths, in pages of so many rows, if any, in reverse."""
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(2, len(LENGTHS), ROWS, 1, HEAD_DIM, generator=generator).to(dtype)
    for entry, length in enumerate(LENGTHS):
        kv[:, entry, length:] = torch.nan
    if page_size:
        kv = kv.reshape(2, -1, page_size, 1, HEAD_DIM).flip(1)
    return kv.unbind()


def _decode(arch: str, *, page_size: int = 0, fp8: bool = False, **options: Any) -> Subject:
    """options: of `decode`."""
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16

    def launched() -> Results:
        generator = torch.Generator().manual_seed(1)
        q = 4 * torch.randn(len(LENGTHS), 2, HEADS, HEAD_DIM, generator=generator).bfloat16()
        given = {"kv_lens": torch.tensor(LENGTHS).int(), "return_lse": True, **options}
        if page_size:
            pages = len(LENGTHS) * ROWS // page_size
            given["page_table"] = torch.arange(pages).flip(0).int().view(len(LENGTHS), -1)
        return decode(q, *_cache(page_size, dtype), arch=arch, **given)

    return Subject(launched)


def _dependent(arch: str, ready: bool = False) -> Results:
    """Launches that read what the one before has written, as queries and, unless keys are `ready`,
    as keys, and write over it."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(len(LENGTHS), 2, HEADS, HEAD_DIM, generator=generator).bfloat16()
    given = {
        "pdl": True, "kv_ready_before_pdl": ready, "return_lse": True, "arch": arch,
        "config": DecodeConfig(cluster=2),
    }  # fmt: skip
    first, _ = decode(q, *_cache(0, q.dtype), kv_lens=torch.tensor(LENGTHS).int(), **given)
    keys = (q if ready else first).reshape(len(LENGTHS), -1, 1, HEAD_DIM)
    second, _ = decode(first, keys, keys, kv_lens=torch.tensor([8, 0, 5]).int(), **given)
    again, _ = decode(q, keys, keys, kv_lens=torch.tensor([8, 0, 1]).int(), out=second, **given)
    return (again,)


def _of(arch: str) -> dict[str, Subject]:
    """With rings so short that they come round."""
    tuning = {"stages": 4, "warps": 4} if arch == "sm_90a" else {"stages": 4}
    two, one = DecodeConfig(cluster=2, **tuning), DecodeConfig(cluster=1, **tuning)
    return {
        f"decode {arch}": _decode(arch, config=two),
        f"decode {arch} paged fp8": _decode(
            arch, page_size=32, fp8=True, window=400, sink_tokens=4, softcap=15.0, config=one
        ),
        f"decode {arch} parts": _decode(arch, sinks=torch.zeros(HEADS), parts=2, config=one),
        f"decode {arch} dependent launch": Subject(lambda: _dependent(arch), "depend"),
        f"decode {arch} dependent launch, keys ready": Subject(
            lambda: _dependent(arch, ready=True), "depend"
        ),
    }


def _merge(raw: bool) -> Results:
    """Six parts, so that threads share a row; one of them has no keys."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for index in range(6):
        o = torch.randn(2, 1, HEADS, HEAD_DIM, generator=generator).bfloat16()
        lse = torch.randn(2, HEADS, 1, generator=generator)
        lse[0] = -torch.inf if index == 2 else lse[0]
        parts.append((o, lse, lse - 1.0) if raw else (o, lse))
    return merge(parts, sinks=torch.zeros(HEADS), arch="sm_90a")


SUBJECTS: dict[str, Subject] = {
    **_of("sm_100a"),
    **_of("sm_90a"),
    "merge": Subject(lambda: _merge(False)),
    "merge raw": Subject(lambda: _merge(True)),
}
