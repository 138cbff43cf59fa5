"""Tables of a file of results: a line per row, those of one kind together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lab.report.documents import Document, Row
from lab.report.toolchains import cases_table, matrix_table
from lab.tools.tables import Column, Table, table

MOST = 24  # columns of a table that is not spelt out below
# What is long, is for programs, or stands in the heading of the file.
HIDDEN = {
    *("kind", "inputs", "samples_us", "sets", "compared_with", "config", "flop", "nbytes"),
    *("sources", "n", "loop", "epilogue", "components", "flags of a run"),
}


def _over_floor(row: Row) -> str:
    return f"{row['cold_us'] / row['floor_us']:.2f}"


def _variant(row: Row) -> str:
    return ", ".join(f"{name} {value}" for name, value in row["variant"].items())


# Of kinds of rows whose names say less than a heading can.
COLUMNS: dict[str, tuple[Column, ...]] = {
    "latency": (
        ("batch", "{batch}"), ("keys", "{kv_len}"), ("kernel", "{peer}"),
        ("cold us", "{cold_us:.2f}"), ("warm us", "{warm_us:.2f}"), ("floor us", "{floor_us:.2f}"),
        ("cold over floor", _over_floor), ("spread", "{cold_spread:.1%}"),
    ),
    "latent": (
        ("problem", "{problem}"), ("kernel", "{peer}"), ("cold us", "{cold_us:.1f}"),
        ("warm us", "{warm_us:.1f}"), ("spread", "{cold_spread:.1%}"),
        ("error of O", "{error:.1e}"),
    ),
    "time": (
        ("problem", "{problem}"), ("kernel", "{peer}"), ("us", "{us:.1f}"),
        ("TFLOP/s", "{tflops:.0f}"), ("of the best peer", "{of_best:.2f}"),
        ("spread", "{spread:.1%}"), ("SM MHz", "{sm_mhz:.0f}"), ("W", "{watts:.0f}"),
    ),
    "layer": (
        ("model", "{model}"), ("format", "{fmt}"), ("routing", "{routing}"), ("tokens", "{tokens}"),
        ("kernel", "{peer}"), ("called", "{how}"), ("us", "{us:.1f}"), ("TFLOP/s", "{tflops:.1f}"),
        ("of the roof", "{of_bound:.2f}"), ("bound by", "{bound}"),
        ("of the best peer", "{of_best:.2f}"), ("spread", "{spread:.1%}"),
    ),
    "step": (
        ("step", "{step}: {name}"), ("rows", "{tokens}"), ("kernel", "{peer}"), ("us", "{us:.2f}"),
        ("TB/s", "{tbs:.3f}"), ("of a copy", "{share:.2f}"), ("spread", "{spread:.1%}"),
    ),
    "q8_0": (
        ("problem", "{problem}"), ("kernel", "{peer}"), ("us", "{us:.2f}"), ("GB/s", "{gbs:.0f}"),
        ("of a copy", "{of_copy:.2f}"), ("of a read", "{of_read:.2f}"), ("spread", "{spread:.1%}"),
    ),
    "unit": (
        ("benchmark", "{benchmark}"), ("of", _variant), ("value", "{value:.4g}"),
        ("low", "{low:.4g}"), ("high", "{high:.4g}"), ("unit", "{unit}"),
    ),
}  # fmt: skip


NEEDED = {"layer": "fmt"}  # other commands call their rows so, too


def tables_of(document: Document) -> list[Table]:
    """Every figure of the file, but for lists that are long and for programs."""
    if document.name in SPECIAL:
        return SPECIAL[document.name](document)
    if document.rows:
        return [*_by_kind(document.rows)]
    rows, parameters = (document.data.get(name) for name in ("rows", "parameters"))
    if isinstance(rows, str):  # where the parameters of a table are from
        rows = [{"parameter": name} | row for name, row in parameters.items()]
    if rows:
        return [plain("", rows)]
    return [flat("", document.data)]


def _by_kind(rows: Sequence[Row]) -> Iterator[Table]:
    for kind in dict.fromkeys(row.get("kind", "") for row in rows):
        mine = [row for row in rows if row.get("kind", "") == kind]
        spelt = COLUMNS.get(kind) if NEEDED.get(kind, "kind") in mine[0] else None
        yield table(kind, spelt, mine) if spelt else plain(kind, mine)


def plain(title: str, rows: Sequence[Row]) -> Table:
    """A column for each name that has a figure or a word."""
    lines = [
        {key: each for key, each in _leaves(row) if _parent(row, key) not in HIDDEN} for row in rows
    ]
    names = list(dict.fromkeys(name for line in lines for name in line))[:MOST]
    return title, names, [[_word(line.get(name, "-")) for name in names] for line in lines]


def _parent(row: Row, key: str) -> str:
    """Return the parent of a figure in its row; `flags` that are a dictionary belong to a run."""
    name = key.partition(",")[0]
    return "flags of a run" if name == "flags" and isinstance(row["flags"], dict) else name


def flat(title: str, data: Row) -> Table:
    """A line per figure: where it stands, and what it is."""
    lines = [[name, _word(value)] for name, value in _leaves(data)]
    return title, ["what", "figure"], lines


def _leaves(data: Row, before: str = "") -> Iterator[tuple[str, Any]]:
    """Figures and words, also those of dictionaries in it."""
    for key, value in data.items():
        name = f"{before}{key}"
        if isinstance(value, dict):
            yield from _leaves(value, f"{name}, ")
        elif not isinstance(value, list):
            yield name, value
        elif len(value) <= 3 and all(isinstance(each, (int, float, str)) for each in value):
            yield name, " .. ".join(map(_word, value))


def _word(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


# -- files of a form of their own -----------------------------------------------------------------


def _attention(document: Document) -> list[Table]:
    """Modelled times with their ranges, and below them what is published."""
    lines, points = [], []
    for row in document.data["rows"]:
        for name, found in row["kernels"].items():
            if "us" in found:
                more = {"row": row["row"], "kernel": name}
                lines.append({**found, **more})
        points += row["published"]
    columns: tuple[Column, ...] = (
        ("shape", "{row}"), ("kernel", "{kernel}"), ("us, modelled", "{us:.4g}"),
        ("range", "{low_us:.4g} .. {high_us:.4g}"), ("TFLOP/s", "{tflops:.0f}"),
        ("our speed over its", "{ratio:.2f} ({low_ratio:.2f} .. {high_ratio:.2f})"),
    )  # fmt: skip
    return [
        table("modelled, not measured", columns, lines),
        plain("published by others, for comparison", points),
    ]


def _layers(document: Document) -> list[Table]:
    columns: tuple[Column, ...] = (
        ("model", "{model}"), ("formats", "{formats}"), ("tokens", "{tokens}"),
        ("layer us, modelled", "{us:.4g}"), ("range", "{low_us:.4g} .. {high_us:.4g}"),
        ("published us", "{rival_us:.4g}"), ("of", "{rival}"),
    )  # fmt: skip
    return [table("modelled, not measured", columns, document.data["rows"])]


def _gpt_oss(document: Document) -> list[Table]:
    runs = []
    for run in document.data["runs"]:
        rates = {f"{phase} tokens/s": found["tokens_per_second"]
                 for phase, found in run.get("rates", {}).items()}  # fmt: skip
        options = {name: run["options"][name] for name in ("model", "batch", "prompt_len")}
        runs.append({"run": run["what"], **options, "experts": run["options"]["experts"], **rates})
    parts = [
        {"run": run["what"], "phase": phase, **part}
        for run in document.data["runs"]
        for phase, found in run.get("kernels", {}).items()
        for part in found.get("parts", ())
    ]
    routes = document.data.get("route_tokens", {"columns": [], "rows": []})
    rest = {name: value for name, value in document.data.items()
            if name.startswith("transformers")}  # fmt: skip
    return [
        plain("runs", runs),
        plain("parts of a step; the floor is calculated", parts),
        ("routing", routes["columns"], [[*map(_word, row)] for row in routes["rows"]]),
        flat("beside", rest),
        plain("attention over two GPUs", document.data.get("ring_attention", [])),
    ]


def _vllm(document: Document) -> list[Table]:
    steps = [
        {**{name: value for name, value in step.items() if not isinstance(value, dict | list)},
         **{f"{name} us": value for name, value in step["us_by_package"].items()}}
        for step in document.data["profiles"]
    ]  # fmt: skip
    return [plain("runs", document.data["rows"]), plain("decode steps", steps)]


def _conformance(document: Document) -> list[Table]:
    """The forms themselves are 6,600 pairs of numbers that say the same: not listed."""
    near = [{"form": form, **found} for form, found in document.data["approximations"].items()]
    return [
        flat("summary", document.data["summary"]),
        plain("approximations, within the manual's bounds", near),
    ]


def _ncu(document: Document) -> list[Table]:
    """A line per metric, since there are more of them than launches."""
    units, *launches = document.rows
    name, *metrics = units
    heads = ["metric", "unit", *(launch[name] for launch in launches)]
    return [("", heads, [[each, units[each], *(launch[each] for launch in launches)]
                         for each in metrics])]  # fmt: skip


SPECIAL: dict[str, Callable[[Document], list[Table]]] = {
    "model_b200_attention.json": _attention,
    "model_b200_layers.json": _layers,
    "gpt_oss_h200.json": _gpt_oss,
    "vllm_h200.json": _vllm,
    "conformance_h100.json": _conformance,
    "toolchains_h200.json": lambda document: [
        matrix_table(document.rows),
        cases_table(document.rows),
    ],
    "ncu_h200.csv": _ncu,
}
