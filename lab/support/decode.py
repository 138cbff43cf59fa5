"""Calls of `gqa_lowlatency.decode`: a row of the space becomes one of `lab.problems.decode`."""

from __future__ import annotations

from typing import Any

import torch

from gqa_lowlatency import decode
from gqa_lowlatency.config import HEAD_DIMS, MAX_Q_TOKENS
from kernelkit.call.launch import emulation
from lab.problems.attention import PATIENCE, SPARE_PAGES
from lab.problems.decode import Case, judge
from lab.support.space import GPU, GPUS, Row, Space
from ptxemu import Options
from ptxemu.check.text import render

KINDS = {  # dtypes of q, and of k and v
    "bf16": ("bf16", ""),
    "fp16": ("fp16", ""),
    "bf16 x e4m3": ("bf16", "e4m3"),
    "fp16 x e4m3": ("fp16", "e4m3"),
    "e4m3": ("e4m3", ""),
    "fp32": ("fp32", ""),
}
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "causal=False": {"causal": False},
    "window=30": {"window": 30},
    "window=(30, 0)": {"window": (30, 0)},
    "causal=False + window=30": {"causal": False, "window": 30},
    "window=30 + sink_tokens": {"window": 30, "sink_tokens": 4},
    "sink_tokens": {"sink_tokens": 4},
    "tree": {"tree": "branches"},
    "tree + window=30": {"tree": "branches", "window": 30},
    "window=(30, 3)": {"window": (30, 3)},
    "causal=False + window=(30, 0)": {"causal": False, "window": (30, 0)},
    "causal=False + window=(30, 3)": {"causal": False, "window": (30, 3)},
}
SOFTCAPS = {"none": 0.0, "30": 30.0, "5000": 5000.0}
SCALES = {"none": "none", "fp32 [1]": "one", "fp32 [Hkv]": "heads"}
HEADS = {"8 of 2": (8, 2), "2 of 2": (2, 2), "40 of 1": (40, 1), "3 of 2": (3, 2)}
FLAT = "1 + q [B, Hq, D]"
PDL = {
    "no": {},
    "yes": {"pdl": True},
    "yes + kv_ready_before_pdl": {"pdl": True, "kv_ready_before_pdl": True},
    "kv_ready_before_pdl": {"kv_ready_before_pdl": True},
}
LENGTHS = "lengths of keys"
MORE = "kv_lens + max_kv_len > S"
LENS, STORED = (200, 17), 237


def case_of(row: Row) -> Case:
    """Return the problem of a row; what a right problem does not have is left to `_changes`."""
    dtype, kv_dtype = KINDS[row["dtype"]]
    page, lengths, pdl = row["page size"], row[LENGTHS], PDL[row["pdl"]]
    mask, flat = MASKS[row["mask"]], row["tokens"] == FLAT
    window = mask.get("window")
    return Case(
        LENS,
        HEADS[row["heads"]],
        1 if flat else int(row["tokens"]),
        int(row["head dim"]),
        dtype,
        kv_dtype,
        SCALES[row["scales"]],
        "" if row["out_dtype"] == "none" else row["out_dtype"],
        causal=mask.get("causal", True),
        window=window[0] if isinstance(window, tuple) else window,
        tree=mask.get("tree", ""),
        sink_tokens=mask.get("sink_tokens", 0),
        firsts=(0, 5) if row["first_keys"] == "yes" else (),
        softcap=SOFTCAPS[row["softcap"]],
        sinks=row["sinks"] == "yes",
        keys=int(page) if page != "none" else "lens" if "kv_lens" in lengths else "dense",
        flat=flat,
        pdl="ready" if len(pdl) > 1 else "pdl" if "pdl" in pdl else "",
        batch_invariant=row["batch_invariant"] == "yes",
        parts=int(row["parts"]),
        cluster=0 if row["cluster"] == "chosen" else int(row["cluster"]),
    )


def _arguments(case: Case, row: Row) -> dict[str, Any]:
    """Arguments of `decode` but for q, k and v, wrong ones too."""
    given = case.options() | case.launch_options(row[GPU])
    mask = {name: value for name, value in MASKS[row["mask"]].items() if name != "tree"}
    given |= mask | PDL[row["pdl"]]
    given["return_lse"] = row["result"] == "O + LSE"
    if row[LENGTHS] == "none":
        given.pop("kv_lens", None)
    if "max_kv_len" in row[LENGTHS]:
        given["max_kv_len"] = 1 << 20 if "> S" in row[LENGTHS] else LENS[0]
    if row["scales"] != "none":
        scale = torch.ones(case.heads[1] if row["scales"] == "fp32 [Hkv]" else 1)
        given = {"k_scale": scale, "v_scale": scale} | given
    return given


def _empty(case: Case) -> list[torch.Tensor]:
    """q, k and v of a problem."""
    tokens = () if case.flat else (case.tokens,)
    keys: tuple[int, int] = (len(LENS), STORED if case.keys == "lens" else LENS[0])
    if isinstance(case.keys, int):
        keys = (sum(-(-length // case.keys) for length in LENS) + SPARE_PAGES, case.keys)
    q = torch.empty(len(LENS), *tokens, case.heads[0], case.head_dim, dtype=case.io)
    k, v = (torch.empty(*keys, case.heads[1], case.head_dim, dtype=case.kv) for _ in range(2))
    return [q, k, v]


def call(row: Row) -> Any:
    """Make the call of a row, with tensors that nobody fills."""
    case = case_of(row)
    given = _arguments(case, row)
    if "page_table" in given:  # some pages that no token sees are in no pool
        given["page_table"] = torch.zeros_like(given["page_table"])
    return decode(*_empty(case), **given)


def wrong(row: Row) -> list[str]:
    """Run an accepted row in the emulator; return what is out of tolerance."""
    case = case_of(row)
    given = _arguments(case, row) | {"return_lse": True}
    with emulation(Options(policy="round-robin", limit=PATIENCE)) as active:
        results = decode(*case.inputs(), **given)
    found = [render(report) for report in active.reports if report.findings]
    return found + [str(each) for each in judge(case, row[GPU], results) if not each.ok]


SPACE = Space(
    "gqa_lowlatency.decode",
    "dtype is that of q, k and v, or of q x (k and v). Lengths `as needed` are kv_lens with pages, "
    "and nothing otherwise. heads are query heads of KV heads, cluster is `config.cluster`. The "
    "calls have two entries of 200 keys.",
    {
        GPU: GPUS,
        "dtype": tuple(KINDS),
        "head dim": (
            "128", *(str(d) for d in HEAD_DIMS if d != 128), "32", "80", "96", "192", "576",
        ),
        "page size": ("none", *map(str, (1, 2, 3, 4, 8, 16, 24, 32, 64, 128, 256, 1024))),
        "tokens": ("1", FLAT, *map(str, range(2, MAX_Q_TOKENS + 1)), "0", "9"),
        LENGTHS: ("as needed", "kv_lens", "kv_lens + max_kv_len", "none", MORE),
        "mask": tuple(MASKS),
        "first_keys": ("no", "yes"),
        "softcap": tuple(SOFTCAPS),
        "sinks": ("no", "yes"),
        "result": ("O", "O + LSE"),
        "out_dtype": ("none", "bf16", "fp16", "fp32", "e4m3"),
        "scales": tuple(SCALES),
        "heads": tuple(HEADS),
        "parts": ("0", "1", "3", "64", "65"),
        "cluster": ("chosen", "1", "2", "8", "16", "3"),
        "batch_invariant": ("no", "yes"),
        "pdl": tuple(PDL),
    },
    (GPU, "dtype", "head dim", "page size"),
    (GPU, "dtype"),
    call,
    wrong,
)  # fmt: skip
