"""Pictures of attention and decode beside peers, of a B200, of models, of an H200."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lab.report.documents import Document, Row
from lab.tools import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes


LINE = 0.125  # inches of a kernel
# Published points: shape by the kernel, filled for a B200, with white in them for other GPUs.
DOUBTED = {("FROST", "hd64-causal"), ("FROST", "gpt-oss-causal-8k")}
"""More than exponentials at one in eight cycles allow: the sample must be wrong."""
SHAPES = {"FlashAttention-4": "s", "cuDNN": "^", "trtllm-gen": "*", "FROST": "P"}


def draw_b200(path: Path, document: Document, source: str = "") -> None:
    """A group per shape: a dot and a range per kernel, below them what is published."""
    rows = [row for row in document.data["rows"] if _timed(row)]
    names = list(dict.fromkeys(name for row in rows for name in _timed(row)))
    lines = sum(len(_timed(row)) + 1.9 for row in rows)
    sets = document.data.get("perturbed", 0)
    gpu = document.data.get("gpu", "GPU")
    how = {
        "height": 1.7 + LINE * lines,
        "title": f"Attention forward on a {gpu}: MODELLED, not measured",
        "caption": f"bf16, date {document.date}. Dot: nominal parameters; bar: range over {sets} "
        "other sets of parameters. Black, below: published by\nothers: filled on a B200, "
        "hollow on a GB200 or on a GPU that is not named. Right is better",
        "keys": 2,
    }
    with style.picture(path, source=source, **how) as (figure, ((axis,),)):
        at, ticks = 0.0, []
        for row in rows:
            end = _group(axis, at, row)
            ticks.append((at + end - 1.4) / 2)
            axis.axhline(end - 0.45, color=style.PALE, linewidth=0.8)
            at = end + 0.5
        axis.set_yticks(ticks, [f"{row['row']}\n{_sizes(row['flags'])}" for row in rows])
        axis.set_ylim(at - 0.9, -0.8)
        axis.set_xlim(0, 1.06 * axis.get_xlim()[1])
        axis.tick_params(axis="y", length=0)
        axis.set_xlabel("TFLOP/s", fontsize=style.SMALL)
        style.grid(axis, "x")
        found = {_kernel(p["rival"]) for row in rows for p in row["published"]}
        style.legend(figure, *_keys(names, sorted(found)))


def _timed(row: Row) -> dict[str, Row]:
    return {name: found for name, found in row["kernels"].items() if "us" in found}


def _group(axis: Axes, at: float, row: Row) -> float:
    """Draws one; returns where it ends."""
    flop = 0.0
    for number, (name, found) in enumerate(_timed(row).items()):
        here = style.look(name, number)
        flop = found["tflops"] * found["us"]
        ends = [flop / found["high_us"], flop / found["low_us"]]
        how = {"linewidth": 5 if here.ours else 3.5, "alpha": 0.5, "solid_capstyle": "butt"}
        axis.plot(ends, [at, at], color=here.colour, **how)
        axis.plot([found["tflops"]], [at], **here.marks(5.5))
        doubted = (name, row["row"]) in DOUBTED
        if here.ours or doubted:
            words = "sample implausible" if doubted else f"{found['tflops']:.0f}"
            place = {"textcoords": "offset points", "xytext": (6, 0), "va": "center"}
            axis.annotate(words, (ends[1], at), fontsize=style.SMALL, weight="bold", **place)
        at += 1
    for point in row["published"]:
        face = style.BLACK if point["gpu"] == "B200" else "white"
        how = {"marker": SHAPES.get(_kernel(point["rival"]), "x"), "color": style.BLACK}
        axis.plot([flop / point["us"]], [at], markerfacecolor=face, markersize=5.5, **how)
    return at + 1.4


def _kernel(rival: str) -> str:
    """'FlashAttention-4' of 'FlashAttention-4 C': the table is no other kernel."""
    return next((name for name in SHAPES if rival.startswith(name)), rival)


def _sizes(flags: str) -> str:
    """'4 x 8k, 32/32 heads' of the flags of a case."""
    names = ("batch", "q-len", "q-heads", "kv-heads")
    found = {name: re.search(rf"--{name} (\S+)", flags) for name in names}
    batch, tokens, heads, kv_heads = (each[1] if each else "?" for each in found.values())
    return f"{batch} x {tokens}, {heads}/{kv_heads} heads"


def _keys(names: Sequence[str], published: Sequence[str]) -> tuple[list[Any], int]:
    """The modelled in the first row of the legend, the published in the second; and how many
    columns that takes, which are filled one by one."""
    from matplotlib.lines import Line2D

    width = max(3, len(names), len(published))
    first: list[Any] = [style.key(name, f"{style.called(name)}, modelled", line=False)
                        for name in names]  # fmt: skip
    black = {"color": style.BLACK, "linestyle": "", "markersize": 5.5}
    second: list[Any] = [
        Line2D([], [], marker=SHAPES.get(name, "x"), label=f"{name}, published", **black)
        for name in published
    ]
    blank = Line2D([], [], linestyle="", label="")
    rows = [[*line, *[blank] * (width - len(line))] for line in (first, second)]
    return [handle for column in zip(*rows, strict=True) for handle in column], width


OURS = "fmha"
BY_LENGTH = ("anchor", "e4m3")  # sets of rows that differ by their length alone
BAR, GAP = 0.155, 0.12  # inches of a bar, and between problems


def draw_prefill(path: Path, document: Document, source: str = "", *, roof: float = 0.0) -> None:
    """A panel per mask and head dim, a line per kernel. roof: TFLOP/s of a large product, measured
    on such a GPU; 0 for none."""
    rows = [row for row in document.rows if "us" in row and row.get("rows") in BY_LENGTH]
    masks = sorted({row["causal"] for row in rows})
    dims = sorted({row["head_dim"] for row in rows})
    names = list(dict.fromkeys(row["peer"] for row in rows))
    how = {
        "height": 1.0 + 2.1 * max(1, len(masks)),
        "title": "Attention forward: TFLOP/s by length (higher is better)",
        "caption": _caption(document, rows),
        "keys": 1,
    }
    shape = max(1, len(masks)), max(1, len(dims))
    with style.picture(path, *shape, source=source, sharey=True, **how) as (figure, axes):
        for line, causal in zip(axes, masks, strict=False):
            for axis, dim in zip(line, dims, strict=True):
                chosen = [r for r in rows if (r["causal"], r["head_dim"]) == (causal, dim)]
                _lines(axis, chosen, names)
                words = f"head dim {dim}, {'causal' if causal else 'full'}"
                axis.set_title(words, loc="left", weight="bold", fontsize=style.SMALL)
            line[0].set_ylabel("TFLOP/s")
        for axis in axes[-1]:
            axis.set_xlabel("tokens of a sequence", fontsize=style.SMALL)
        most = max((row["tflops"] for row in rows), default=1.0)
        axes[0][0].set_ylim(0, 1.17 * max(most, roof))
        keys = [style.key(name) for name in names]
        style.legend(figure, [*keys, *_roof(axes, roof)])


def _roof(axes: Any, roof: float) -> list[Any]:
    """A line in every panel, and its key; nothing without one."""
    if not roof:
        return []
    for axis in axes.flat:
        line = axis.axhline(roof, color=style.BLACK, linewidth=1.2, zorder=2)
    line.set_label(f"large product by torch, {roof:.0f}")
    return [line]


def _caption(document: Document, rows: Sequence[Row]) -> str:
    """GPU, heads, dtype, date."""
    dtypes = ", ".join(dict.fromkeys(row["dtype"] for row in rows))
    heads = ", ".join(dict.fromkeys(f"{r['q_heads']} of {r['head_dim']}" for r in rows))
    tokens = ", ".join(dict.fromkeys(str(r["batch"] * r["sq"]) for r in rows))
    return (
        f"Measured on one {document.gpu}, {document.date}: {dtypes}, {heads or 'no'} heads, "
        f"{tokens or 'no'} tokens in all.\nAll alternated in one run, nothing in L2; causal "
        "FLOP count half. Numbers are those of ours"
    )


def _lines(axis: Axes, rows: Sequence[Row], names: Sequence[str]) -> None:
    lengths = sorted({row["skv"] for row in rows})
    places = {length: at for at, length in enumerate(lengths)}
    for number, name in enumerate(names):
        mine = sorted((places[r["skv"]], r["tflops"]) for r in rows if r["peer"] == name)
        if not mine:
            continue
        here = style.look(name, number)
        axis.plot(*zip(*mine, strict=True), **here.line(), zorder=4 if here.ours else 3)
        for at, rate in mine if here.ours else ():
            place = {"textcoords": "offset points", "xytext": (0, 7), "ha": "center", "zorder": 5}
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
            words = {"fontsize": style.SMALL, "weight": "bold", "bbox": box}
            axis.annotate(f"{rate:.0f}", (at, rate), **words, **place)
    axis.set_xticks(range(len(lengths)), style.named(lengths))
    axis.set_xlim(-0.35, len(lengths) - 0.65)
    style.grid(axis, "y")


# -- shapes of models -----------------------------------------------------------------------------


def draw_any(path: Path, document: Document) -> None:
    """Lines where lengths are all that differs, else bars of every problem."""
    timed = [row for row in document.rows if "us" in row]
    alike = all(row.get("rows") in BY_LENGTH for row in timed)
    (draw_prefill if timed and alike else draw_bars)(path, document)


def draw_models(path: Path, document: Document, source: str = "") -> None:
    """Bars of what is not in the picture by length."""
    rows = [row for row in document.rows if row.get("rows") not in BY_LENGTH]
    draw_bars(path, replace(document, rows=rows), source)


def draw_bars(path: Path, document: Document, source: str = "") -> None:
    """A group of bars per problem, one bar per kernel."""
    rows = [row for row in document.rows if "us" in row]
    problems: dict[str, list[Row]] = {}
    for row in rows:
        problems.setdefault(title_of(row), []).append(row)
    names = list(dict.fromkeys(row["peer"] for row in rows))
    dtypes = ", ".join(dict.fromkeys(_dtypes(row) for row in rows))
    how = {
        "height": 1.3 + sum(max(BAR * len(found) + GAP, 2.3 * BAR) for found in problems.values()),
        "title": "Attention forward, shapes of models: TFLOP/s (longer is better)",
        "caption": f"Measured on one {document.gpu}, {document.date}: {dtypes}.\nAll alternated in "
        "one run, nothing in L2; labels: entries x tokens, query / KV heads of dimension",
        "keys": 1,
    }
    with style.picture(path, source=source, **how) as (figure, ((axis,),)):
        _bars(axis, problems)
        axis.set_xlabel("TFLOP/s", fontsize=style.SMALL)
        style.legend(figure, [style.key(name, line=False) for name in names])


def title_of(row: Row) -> str:
    """Title of a problem: its shape and mask."""
    dims = str(row["head_dim"])
    dims += f", {row['v_dim']}" if row["v_dim"] != row["head_dim"] else ""
    mask = "causal" if row["causal"] else "full"
    if row["window"] is not None:
        mask = f"window {row['window'] + 1}"
    more = ", sinks" * row["sinks"] + ", K is V" * row["k_is_v"]
    (words,) = style.named([row["skv"]])
    heads = f"{row['q_heads']}/{row['kv_heads']} of {dims}"
    return f"{row['batch']} x {words}, {heads}\n{mask}{more}"


def _dtypes(row: Row) -> str:
    """Dtypes of q, and of k and v where it is another."""
    kv_dtype = row.get("kv_dtype")
    return f"{row['dtype']} with {kv_dtype} keys" if kv_dtype else row["dtype"]


def _bars(axis: Axes, problems: dict[str, list[Row]]) -> None:
    at, ticks = 0.0, []
    most = max((row["tflops"] for found in problems.values() for row in found), default=1.0)
    for found in problems.values():
        first = at
        mixed = len({_dtypes(row) for row in found}) > 1
        for number, row in enumerate(sorted(found, key=lambda row: row["peer"] != OURS)):
            here = style.look(row["peer"], number)
            bar: dict[str, Any] = {"color": here.colour, "alpha": 1.0 if here.ours else 0.45}
            axis.barh(at, row["tflops"], BAR * 0.8, **bar)
            axis.plot([row["tflops"]], [at], **here.marks(5))
            weight = "bold" if here.ours else "normal"
            place = (row["tflops"] + 0.012 * most, at)
            words = f"{row['tflops']:.0f}" + f"  {_dtypes(row)}" * mixed
            axis.text(*place, words, va="center", fontsize=7.5, weight=weight)
            at += BAR
        ticks.append((first + at - BAR) / 2)
        at += max(GAP, 2.3 * BAR - (at - first))  # two lines of text have room
    axis.set_yticks(ticks, list(problems), linespacing=1.05)
    axis.set_ylim(at, -BAR)
    axis.set_xlim(0, 1.18 * most)
    axis.tick_params(axis="y", length=0)
    style.grid(axis, "x")


COLUMNS = 3
PHASES = {"decode": "decoding", "prefill": "prompt"}


def draw_gpt_oss(path: Path, document: Document, source: str = "") -> None:
    """A panel per run: a bar per part, and a mark where its floor is."""
    panels = panels_of(document)
    lines = -(-len(panels) // COLUMNS) or 1
    how = {
        "height": 1.25 + 1.72 * lines,
        "title": "gpt-oss: parts of a step and their floors (shorter is better)",
        "caption": f"Measured on {document.gpu}, {document.date}: bf16, experts mxfp4, "
        "64 query and 8 KV heads of 64.\nFloor (calculated): bytes and products at the speed of a "
        "large read and a large product of that GPU. Each panel has its own scale",
        "keys": 1,
    }
    with style.picture(path, lines, COLUMNS, source=source, **how) as (figure, axes):
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
        for number, (axis, (title, parts)) in enumerate(zip(axes.flat, panels, strict=False)):
            _panel_of_model(axis, parts, named=number % COLUMNS == 0)
            axis.set_title(title, loc="left", weight="bold", fontsize=style.SMALL)
        style.legend(figure, _keys_of_models())


def panels_of(document: Document) -> list[tuple[str, list[Row]]]:
    """(run and phase in words, its parts) of each that has floors, decoding first."""
    found = []
    for phase, words in PHASES.items():
        for run in document.data["runs"]:
            kernels = run.get("kernels", {}).get(phase, {})
            parts = kernels.get("parts", ())
            if any(part["floor_us"] for part in parts):
                more = ", two GPUs" if "both GPUs" in run["what"] else ""
                more += f", {kernels['of'].partition(',')[0]}" if "of" in kernels else ""
                found.append((_title(run["options"], words) + more, [*parts]))
    return found


def _title(options: Row, phase: str) -> str:
    (length,) = style.named([options["prompt_len"]])
    return f"{options['model']}, {phase}\n{options['batch']} x {length} tokens"


def _keys_of_models() -> list:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    floor = {"color": style.BLACK, "marker": "|", "markersize": 10, "markeredgewidth": 2.2}
    return [
        Patch(facecolor=style.SKY, edgecolor=style.BLUE, label="kernels of the part, ms per step"),
        Line2D([], [], linestyle="", label="floor, and the ratio to it", **floor),
    ]


def _panel_of_model(axis: Axes, parts: Sequence[Row], *, named: bool) -> None:
    most = max(part["us"] for part in parts) / 1000
    for at, part in enumerate(parts):
        ms, floor = part["us"] / 1000, (part["floor_us"] or 0) / 1000
        axis.barh(at, ms, 0.72, facecolor=style.SKY, edgecolor=style.BLUE)
        words = f"{ms:.3g}"
        if floor:
            axis.plot([floor, floor], [at - 0.45, at + 0.45], color=style.BLACK, linewidth=2.2)
            words += f"  ({ms / floor:.1f} x)"
        axis.text(ms + 0.02 * most, at, words, va="center", fontsize=style.SMALL)
    axis.set_yticks(range(len(parts)), [part["part"] if named else "" for part in parts])
    axis.set_ylim(len(parts) - 0.4, -0.6)
    axis.set_xlim(0, 1.45 * most)
    axis.locator_params(axis="x", nbins=4)
    axis.tick_params(axis="y", length=0)
    style.grid(axis, "x")


PUBLISHED = "published"  # as a peer: the fastest that others measured
FAR = 2.0  # above so many times the median of a panel its axis ends
ROW = 0.165  # inches of a kernel


def draw_decode(
    path: Path, document: Document, source: str = "", *, published: Sequence[Row] = ()
) -> None:
    """A panel per batch and number of keys, a row per kernel: its cold time over the floor.

    published: gpu, batch, keys, us and source of others' figures; the fastest of the same GPU has a
    row of its own.
    """
    rows = [row for row in document.rows if "cold_us" in row]
    rows += fastest(rows, [row for row in published if row["gpu"] in document.gpu])
    batches, lengths = (sorted({row[name] for row in rows}) for name in ("batch", "kv_len"))
    names = list(dict.fromkeys(row["peer"] for row in rows))
    how = {
        "height": 1.15 + len(batches) * (0.62 + ROW * len(names)),
        "title": "Decode attention: time over the floor (shorter is better)",
        "caption": caption(document, rows),
    }
    shape = max(1, len(batches)), max(1, len(lengths))
    with style.picture(path, *shape, source=source, sharey="row", **how) as (_, axes):
        for line, batch in zip(axes, batches, strict=False):
            for axis, length in zip(line, lengths, strict=True):
                chosen = [r for r in rows if (r["batch"], r["kv_len"]) == (batch, length)]
                _panel(axis, {row["peer"]: row for row in chosen}, names)
                floor = f", floor {us(chosen[0]['floor_us'])} us" if chosen else ""
                (words,) = style.named([length])
                title = {"loc": "left", "fontsize": style.SMALL, "weight": "bold"}
                axis.set_title(f"batch {batch}, {words} keys{floor}", **title)
        for axis in axes[-1]:
            axis.set_xlabel("time / floor", fontsize=style.SMALL)


def fastest(rows: Sequence[Row], published: Sequence[Row]) -> list[Row]:
    """A row of PUBLISHED for each problem of `rows` that somebody published a time of."""
    found = []
    floors = {(row["batch"], row["kv_len"]): row["floor_us"] for row in rows}
    for (batch, keys), floor in floors.items():
        same = [r for r in published if (int(r["batch"]), int(r["keys"])) == (batch, keys)]
        if same:
            best = min(same, key=lambda row: float(row["us"]))
            words = {"peer": PUBLISHED, "cold_us": float(best["us"]), "by": best["source"]}
            found.append({"batch": batch, "kv_len": keys, "floor_us": floor, **words})
    return found


def caption(document: Document, rows: Sequence[Row]) -> str:
    """GPU, heads, dtype, date."""
    of = rows[0] if rows else {}
    heads = f"{of.get('q_heads')} query heads, {of.get('kv_heads')} KV heads of "
    words = f"Measured on one {document.gpu}, {document.date}: {heads}{of.get('head_dim')}, "
    words += f"{of.get('dtype')}, one new token, nothing in L2.\nFloor (the line at 1): reading as "
    words += "many bytes. Figures: microseconds. Every panel has a scale of its own"
    if any(row["peer"] == PUBLISHED for row in rows):
        words += ".\nBlack: the fastest that others published for such a GPU "
        words += "(published_decode_rivals.csv), without flushing L2"
    return words


def _panel(axis: Axes, found: dict[str, Row], names: Sequence[str]) -> None:
    ratios = {name: row["cold_us"] / row["floor_us"] for name, row in found.items()}
    near = [ratio for ratio in ratios.values() if ratio <= FAR * median(ratios.values())] or [1.0]
    low, high = min(1.0, *near), max(1.0, *near)
    span = max(high - low, 0.05)
    axis.axvline(1.0, color=style.BLACK, linewidth=1.2)
    for at, name in enumerate(names):
        if name not in ratios:
            words = "none known" if name == PUBLISHED else "not measured"
            how = {"color": style.GREY, "va": "center", "fontsize": style.SMALL}
            axis.text(1.0 + 0.02 * span, at, words, **how)
            continue
        here = style.look(name, at)
        right = min(ratios[name], high)
        far = ratios[name] > high
        axis.plot([1.0, right], [at, at], color=here.colour, linewidth=2 if here.ours else 1.2)
        marks: dict[str, Any] = here.marks(5.5) | ({"marker": ">"} if far else {})
        axis.plot([right], [at], **marks)
        words = us(found[name]["cold_us"]) + (f" ({ratios[name]:.0f} x)" if far else "")
        words += f" {found[name]['by'].partition(' ')[0]}" if "by" in found[name] else ""
        weight = "bold" if here.ours else "normal"
        place = (max(right, 1.0) + 0.045 * span, at)
        axis.text(*place, words, va="center", fontsize=style.SMALL, weight=weight)
    axis.set_xlim(low - 0.07 * span, high + 0.34 * span)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.set_yticks(range(len(names)), [style.called(name) for name in names])
    axis.locator_params(axis="x", nbins=4)
    style.grid(axis, "x")


def us(microseconds: float) -> str:
    """Three digits."""
    return f"{microseconds:.{2 if microseconds < 10 else 1 if microseconds < 100 else 0}f}"
