"""What a soak of attention has done: problems by feature, the worst errors, failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from kernelkit import tolerance
from workbench.accuracy import share
from workbench.problems.attention import Case
from workbench.tables import Table, table

Feature = Callable[[Case], object]
LARGE = 100.0  # amplitude

FEATURES: dict[str, Feature] = {
    "all": lambda case: True,
    **{
        f"head dim {d}": lambda case, d=d: case.dims[0] == d
        for d in (64, 96, 128, 192, 256, 512)
    },
    "bf16": lambda case: case.dtype == "bf16",
    "fp16": lambda case: case.dtype == "fp16",
    "e4m3 keys, bf16 queries": lambda case: case.kv_dtype == "e4m3",
    "e4m3": lambda case: case.dtype == "e4m3",
    "O of another dtype": lambda case: case.out_dtype not in ("", case.dtype),
    "raw O": lambda case: not case.normalize,
    "causal": lambda case: case.causal,
    "left window": lambda case: case.window[0] is not None,
    "right window": lambda case: case.window[1] is not None,
    "sink tokens": lambda case: case.sink_tokens,
    "learned sinks": lambda case: case.sinks,
    "sinks of -inf or 90": lambda case: case.sink_value is not None,
    "softcap": lambda case: case.softcap,
    "rope": lambda case: case.rope_dim,
    "q_offset": lambda case: case.q_offset is not None,
    "kv_lens": lambda case: case.kv_lens is not None,
    "pages": lambda case: case.page_size,
    "packed q": lambda case: case.q_lens is not None,
    "packed k and v": lambda case: case.k_lens is not None,
    "packed heads": lambda case: case.pack_heads,
    "groups of heads": lambda case: case.heads[0] > case.heads[1],
    "tokens first in memory": lambda case: case.tokens_first,
    "entries without queries": lambda case: 0 in case.queries,
    "entries without keys": lambda case: 0 in case.keys,
    "rows of 100k keys": lambda case: max(case.queries) and max(case.keys) >= 100_000,
    "scores of 0": lambda case: case.amplitude == 0.0,
    "huge scores": lambda case: case.amplitude >= LARGE,
    "scores that climb": lambda case: case.climb,
    "a tuned tile": lambda case: case.tile_m or case.tile_n,
    "tuned CTAs": lambda case: case.ctas,
    "tuned rings": lambda case: case.k_stages or case.v_stages,
    "a tuned schedule": lambda case: case.schedule,
    "a tuned polynomial": lambda case: case.polynomial >= 0,
    "a tuned lag": lambda case: case.rescale_log2 != Case.rescale_log2,
    "pdl": lambda case: case.pdl,
    "K is V": lambda case: case.k_is_v,
}  # fmt: skip
COLUMNS = (
    ("problems with", "{feature}"), ("number", "{problems:,}"), ("failed", "{failed}"),
    ("O, of its limit", "{output:.0%}"), ("LSE, of its limit", "{lse:.0%}"),
)  # fmt: skip


@dataclass
class Tally:
    """output, lse: the largest error of O and of the LSE as a share of its tolerance."""

    problems: int = 0
    failed: int = 0
    output: float = 0.0
    lse: float = 0.0


@dataclass
class Failure:
    """command: repeats it; problems: their names; case: the first of them; wrong: what was."""

    problems: list[str]
    command: str
    case: str
    wrong: list[str]

    def __str__(self) -> str:
        return "\n    ".join([f"FAILED {self.command}", self.case, *self.wrong])


@dataclass
class Record:
    tallies: dict[str, Tally] = field(default_factory=lambda: {name: Tally() for name in FEATURES})
    failures: list[Failure] = field(default_factory=list)
    kernels: int = 0
    compile_seconds: float = 0.0
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def problems(self) -> int:
        return self.tallies["all"].problems

    def add(self, case: Case, reports: Sequence[tolerance.Report], *, failed: bool) -> None:
        """A problem that was run; without reports where it could not be judged."""
        shares = {report.name: share(report) for report in reports}
        for name, has in FEATURES.items():
            if has(case):
                tally = self.tallies[name]
                tally.problems += 1
                tally.failed += failed
                tally.output = max(tally.output, shares.get("O", 0.0))
                tally.lse = max(tally.lse, shares.get("LSE", 0.0))

    def rows(self) -> list[dict]:
        """Of the features that occurred."""
        named = ({"feature": name, **asdict(tally)} for name, tally in self.tallies.items())
        return [row for row in named if row["problems"]]

    def table(self) -> Table:
        return table("", COLUMNS, self.rows())
