"""Calls of `fmha.attention`: a row of the space becomes a problem of `lab.problems.attention`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fmha import attention
from fmha.config import HEAD_DIMS, PORTABLE_DIMS, PORTABLE_PAGE_SIZES
from lab.problems.attention import DTYPES, SPARE_PAGES, Case, judge, run
from lab.support.space import GPU, GPUS, Row, Space

KINDS = {  # dtypes of q, and of k and v
    "bf16": ("bf16", ""),
    "fp16": ("fp16", ""),
    "e4m3": ("e4m3", ""),
    "bf16 x e4m3": ("bf16", "e4m3"),
    "fp16 x e4m3": ("fp16", "e4m3"),
    "fp32": ("fp32", ""),
}
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True},
    "window=(30, None)": {"window": (30, None)},
    "window=(None, 3)": {"window": (None, 3)},
    "window=(30, 3)": {"window": (30, 3)},
    "causal + window=(30, None)": {"causal": True, "window": (30, None)},
    "causal + window=(30, 3)": {"causal": True, "window": (30, 3)},
    "window=(9, 0) + sink_tokens": {"window": (9, 0), "sink_tokens": 4},
    "sink_tokens": {"sink_tokens": 4},
    "tree": {"tree": "branches"},
    "tree + window=(30, None)": {"tree": "branches", "window": (30, None)},
    "tree + window=(30, 3)": {"tree": "branches", "window": (30, 3)},
    "mask_mod": {"mask": "document"},
    "causal + mask_mod": {"causal": True, "mask": "prefix"},
    "score_mod": {"mask": "alibi"},
    "block_mask": {"mask": "sliding-global", "blocks": 128},
}
RESULTS = {"O": True, "O + LSE": True, "normalize=False": False}
SOFTCAPS = {"none": 0.0, "30": 30.0, "5000": 5000.0}
OFFSETS = {"none": None, "int": 3, "int32 [B]": (3, 0)}
PACKED = {"none": None, "True": True, "False": False}
HEADS = {"4 of 2": (4, 2), "2 of 2": (2, 2), "8 of 1": (8, 1), "3 of 2": (3, 2)}
LENGTHS = "lengths of keys"
OWN = [f"{d}/{dv}" for d, dv in HEAD_DIMS if d != dv]
Q_LENS, K_LENS, STORED = (3, 5), (40, 17), (44, 20)


@dataclass(frozen=True)
class Call(Case):
    """A problem as a row words it, with arguments that a right problem does not have.

    scaled: the scales that are given.
    lengths, queries: how keys and queries are stored.
    """

    scaled: str = "none"
    lengths: str = "as needed"
    stored: str = "dense"

    def options(self) -> dict[str, Any]:
        """Arguments that `attention` and the reference share."""
        options = super().options()
        if self.lengths == "none":
            options.pop("kv_lens", None)
        return options

    def arguments(self) -> dict[str, Any]:
        """Arguments of `attention`."""
        most = {"max_seqlen_q": max(Q_LENS)} if "max_seqlen_q" in self.stored else {}
        return super().arguments() | most

    def _scales_of_heads(self) -> dict[str, torch.Tensor]:
        names = self.scaled.split(" + ")
        return {name: torch.linspace(0.5, 2.0, self.heads[name != "q_scale"]) for name in names}


def case_of(row: Row) -> Call:
    """Return the problem of a row."""
    dtype, kv_dtype = KINDS[row["dtype"]]
    dim, _, v_dim = row["head dim"].partition("/")
    pages, lengths = row["page size"] != "none", row[LENGTHS]
    packed = "cu_seqlens_k" in lengths
    instructions = row["instructions"]
    return Call(
        max(Q_LENS), STORED[0], HEADS[row["heads"]], len(Q_LENS), dtype,
        kv_dtype=kv_dtype,
        dims=(int(dim), int(v_dim or dim)),
        instructions="" if instructions == "chosen" else instructions,
        page_size=int(row["page size"]) if pages else 0,
        kv_lens=K_LENS if pages or "kv_lens" in lengths else None,
        k_lens=STORED if packed else None,
        q_lens=Q_LENS if "cu_seqlens_q" in row["queries"] else None,
        softcap=SOFTCAPS[row["softcap"]],
        sinks=row["sinks"] == "yes",
        normalize=RESULTS[row["result"]],
        out_dtype="" if row["out_dtype"] == "none" else row["out_dtype"],
        q_offset=OFFSETS[row["q_offset"]],
        rope_dim=0 if row["rope"] == "none" else int(row["rope"]),
        pack_heads=PACKED[row["pack_heads"]],
        pdl=row["pdl"] == "yes",
        scales=row["scales"] != "none",
        scaled=row["scales"],
        lengths=lengths,
        stored=row["queries"],
        **MASKS[row["mask"]],
    )  # fmt: skip


def call(row: Row) -> Any:
    """Make the call of a row, with tensors that nobody fills."""
    case = case_of(row)
    changes: dict[str, Any] = {"return_lse": row["result"] == "O + LSE"}
    if case.page_size and case.k_lens:
        case = replace(case, k_lens=None)
        changes["cu_seqlens_k"] = torch.tensor([0, STORED[0], sum(STORED)], dtype=torch.int32)
    return attention(*_empty(case), **(case.arguments() | changes), arch=row[GPU])


def _empty(case: Call) -> list[torch.Tensor]:
    """q, k and v of a problem."""
    queries: tuple[int, ...] = (sum(Q_LENS),) if case.q_lens else (case.batch, case.sq)
    keys: tuple[int, ...] = (sum(STORED),) if case.k_lens else (case.batch, case.skv)
    if case.page_size:
        used = sum(-(-length // case.page_size) for length in K_LENS)
        keys = (used + SPARE_PAGES, case.page_size)
    kind = DTYPES[case.kv_dtype or case.dtype]
    sizes = zip((queries, keys, keys), (0, 1, 1), (0, 0, 1), strict=True)
    return [
        torch.empty(*rows, case.heads[head], case.dims[dim], dtype=kind if head else case.io)
        for rows, head, dim in sizes
    ]


def wrong(row: Row) -> list[str]:
    """Run an accepted row in the emulator; return what is out of tolerance."""
    case = case_of(row)
    results = run(case, "round-robin", arch=row[GPU])
    return [str(report) for report in judge(case, results) if not report.ok]


SPACE = Space(
    "fmha.attention",
    "dtype is that of q, k and v, or of q x (k and v). A head dim is D, or D/Dv where they differ. "
    "Lengths `as needed` are kv_lens with pages, and nothing otherwise. rope is the number of "
    "columns that are rotated back, instructions is `config.instructions`. The calls have two "
    "entries of 5 queries and 44 keys.",
    {
        GPU: GPUS,
        "instructions": ("chosen", "mma.sync"),
        "dtype": tuple(KINDS),
        "head dim": (
            "64", *(str(d) for d in PORTABLE_DIMS if d != 64), *OWN,
            "8", "24", "100", "528", "128/192", "64/256", "512/16", "576/512",
        ),
        "page size": ("none", *map(str, PORTABLE_PAGE_SIZES), "12", "24"),
        LENGTHS: ("as needed", "kv_lens", "cu_seqlens_k", "cu_seqlens_k + kv_lens", "none"),
        "queries": ("dense", "cu_seqlens_q", "cu_seqlens_q + max_seqlen_q", "max_seqlen_q"),
        "mask": tuple(MASKS),
        "softcap": tuple(SOFTCAPS),
        "sinks": ("no", "yes"),
        "result": tuple(RESULTS),
        "out_dtype": ("none", "bf16", "fp16", "fp32", "e4m3"),
        "q_offset": tuple(OFFSETS),
        "rope": ("none", "16", "64"),
        "scales": ("none", "k_scale + v_scale", "q_scale"),
        "pack_heads": tuple(PACKED),
        "heads": tuple(HEADS),
        "pdl": ("no", "yes"),
    },
    (GPU, "instructions", "dtype", "head dim", "page size"),
    (GPU, "dtype"),
    call,
    wrong,
)  # fmt: skip
