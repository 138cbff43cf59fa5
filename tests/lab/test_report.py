"""The report: every file of results/ is in it, pictures are labelled, and docs/ is up to date.

The house rules, which parse every file, check that docs/house.png shows the current imports.
"""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from PIL import Image

from lab.cycles import subjects
from lab.house import map
from lab.house.source import ROOT
from lab.report import attention as pictures
from lab.report import cache, latent, moe, ncu, perform, steps
from lab.report.documents import RESULTS, UNKNOWN, Document, read
from lab.report.figures import COLUMNS, SPECIAL, tables_of
from lab.report.perform import COMMANDS
from lab.report.sections import ELSEWHERE, SECTIONS, Section, named
from lab.tools import style
from lab.tools.command import Command
from lab.verbs.nsight import LATENCY, METRICS, PER_ISSUE, STALL, WORDS

DOCS = ROOT / "docs"
OF_DOCS = [section for section in SECTIONS if section.docs]
HEAD = {"kind": "setting", "date": "2026-11-21", "gpu": {"name": "a GPU"}}
MACHINE = {"read_tbs": 4.0, "tensor_tflops": 800.0}
# Linear RGB as seen without green cones (Machado and others, 2009).
WITHOUT_GREEN = np.array([
    [0.367322, 0.860646, -0.227968],
    [0.280085, 0.672501, 0.047413],
    [-0.011820, 0.042940, 0.968881],
])  # fmt: skip


# -- tiny inputs ----------------------------------------------------------------------------------


def latencies() -> Document:
    of = {"batch": 1, "kv_len": 1024, "q_heads": 8, "kv_heads": 1, "head_dim": 64, "dtype": "bf16"}
    times = {"decode": 12.0, "torch cudnn": 15.0, "flashinfer xqa": 14.0, "flex": 300.0}
    rows = [{**of, "peer": peer, "floor_us": 10.0, "cold_us": us} for peer, us in times.items()]
    return Document("", HEAD, rows)


def attention(**more: object) -> Document:
    of = {"rows": "anchor", "batch": 1, "sq": 1024, "skv": 1024, "q_heads": 32, "kv_heads": 32,
          "head_dim": 64, "v_dim": 64, "dtype": "bf16", "causal": True, "window": None,
          "sinks": False, "kv_dtype": "", "k_is_v": False, "us": 3.0, **more}  # fmt: skip
    rows = [{**of, "peer": peer, "tflops": rate} for peer, rate in (("fmha", 431.2), ("fa4", 300))]
    return Document("", HEAD, [*rows, {**of, "peer": "fa2", "refused": "no"} | {"us": 0}][:2])


def modelled() -> Document:
    ours = {"us": 50.0, "low_us": 40.0, "high_us": 100.0, "tflops": 200.0}
    best = {"rival": "cuDNN", "gpu": "GB200", "us": 106.5, "source": "a benchmark"}
    flags = "--head-dim 64 --q-len 8k --kv-len 8k --batch 4 --q-heads 32 --kv-heads 2"
    kernels = {"ours": ours, "FlashAttention-4": {"refused": "no sinks"}}
    rows = [
        {"row": "one", "flags": flags, "kernels": kernels, "published": [best]},
        {"row": "two", "flags": flags, "kernels": {"ours": {"refused": "no"}}, "published": []},
    ]
    return Document("", data={"gpu": "B200", "perturbed": 12, "rows": rows})


def layers() -> Document:
    of = {"kind": "layer", "model": "m", "fmt": "mxfp4", "part": "layer", "routing": "random",
          "how": "graph", "bound_us": 5.0, "flop": 1e9, "nbytes": 1e8, "tflops": 100.0}  # fmt: skip
    rows = [{**of, "tokens": n, "peer": peer, "us": 10.0 + n}
            for n in (1, 64) for peer in ("moe", "triton")]  # fmt: skip
    return Document("", HEAD | MACHINE, rows)


def layers_modelled() -> Document:
    row = {"model": "m", "formats": "mxfp8 x mxfp4", "tokens": 4, "us": 10.0, "low_us": 8.0,
           "high_us": 12.5, "rival_us": 20.0, "rival": "somebody"}  # fmt: skip
    return Document("", data={"gpu": "B200", "rows": [row]})


def whole_model() -> Document:
    options = {"model": "20b", "batch": 1, "prompt_len": 2048}
    parts = [{"part": "experts", "us": 3000.0, "floor_us": 1500.0},
             {"part": "rest", "us": 100.0, "floor_us": None}]  # fmt: skip
    run = {"what": "one request", "options": options, "kernels": {"decode": {"parts": parts}}}
    return Document("", {"date": "2026-11-21", "device": "a GPU"}, data={"runs": [run]})


def movements() -> Document:
    of = {"kind": "step", "step": "append", "name": "fp8_584"}
    rows = [{**of, "tokens": n, "peer": peer, "share": share}
            for n in (1, 64) for peer, share in (("kvcache", 0.5), ("torch", 0.1))]  # fmt: skip
    return Document("", HEAD, rows)


def cycles() -> Document:
    row = {"kind": "cycles", "name": "head dim 64", "flags": "--ctas 2 --causal", "cycles": 100}
    return Document("", HEAD, [row | {"modelled": [90, 80, 110]}])


def latent_rows() -> Document:
    """Two problems, of which FlashMLA has one."""
    timed = {("one", "mla"): 7.0, ("one", "flashmla"): 14.0, ("two", "mla"): 8.0}
    rows = [{"kind": "latent", "rows": "v4", "problem": problem, "peer": peer, "warm_us": us}
            for (problem, peer), us in timed.items()]  # fmt: skip
    rows.append({"kind": "latent", "rows": "v4", "problem": "two", "peer": "flashmla"})
    return Document("", HEAD, rows)


def launch() -> Document:
    """A document of one kernel, which spends its time in DRAM: units, then the launch."""
    shown = dict.fromkeys(ncu.UNITS.values(), "10") | {ncu.UNITS["DRAM"]: "58.4", LATENCY: "10"}
    stalls = {"wait": "1", "long_scoreboard": "6", ncu.WORK: "3"}
    row = {**dict.fromkeys((*WORDS, *METRICS), "0"), ncu.NAME: "gqa_decode_sm90_d128_cutlass_0",
           "Grid Size": "(8, 4, 1)", "Block Size": "(1, 1, 1)", "gpu__time_duration.sum": "12160",
           **shown, **{f"{STALL}{name}{PER_ISSUE}": n for name, n in stalls.items()}}  # fmt: skip
    return Document("", HEAD, [dict.fromkeys(row, "%"), row], notes="L2 cold")


def story() -> cache.Story:
    lanes = (cache.Lane("first", 40, 0, (1, 2), 1), cache.Lane("second", 33, 32, (1, 3), 2))
    sizes = {"blocks": 2**20, "states": 2**21, "checkpoints": 2**19}
    slots = {"blocks": 4, "states": 3, "checkpoints": 2}
    return cache.Story("a model", 32, lanes, slots, sizes, (("states", 1, "checkpoints", 0),), (0,))


@pytest.fixture
def figure(monkeypatch):
    """figure(draw, document): its axes and texts, without writing a file."""
    from matplotlib.text import Text

    def call(draw, document, **more):
        kept = []

        def keep(made, path, source=""):
            words = " | ".join(text.get_text() for text in made.findobj(Text))
            kept.append((made.axes, words))

        monkeypatch.setattr(style, "write", keep)
        draw(None, document, **more)
        return kept[0]

    return call


# -- contents of the page -------------------------------------------------------------------------


def test_every_file_of_results_is_on_the_page_and_has_its_command():
    files = {path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.*")}
    assert {name for section in SECTIONS for name in section.files} == files
    assert {*COMMANDS} == files


@pytest.mark.parametrize("command", sorted({
    found[1] for text in COMMANDS.values()
    if (found := re.match(r"python scripts/([^,;]*FILE)(?! --pert)", text))
}))  # fmt: skip
def test_commands_are_such_as_there_are(run, monkeypatch, tmp_path, command):
    monkeypatch.setattr(Command, "perform", lambda self, options: 0)
    assert run(command.replace("FILE", str(tmp_path / "a.json"))).returncode == 0


def test_a_page_says_of_every_file_what_it_is_of_and_whether_it_is_modelled():
    text = perform.html(named(["decode", "attention-b200", "moe-b200"]))
    assert "NVIDIA H100 80GB HBM3, 2026-11-21; made by <code>python scripts/bench.py gqa" in text
    assert '<img src="decode_h100.png"' in text
    assert text.count('<span class="modelled">modelled</span> ') == 3  # one in the definition
    assert text.count('<span class="published">published</span>') == 6
    assert "Tables of flash-attention pull request 2605" in text  # the source of points
    assert "<td>2194 </td>" not in text
    assert "<td>2013 .. 2416</td>" in text
    assert "<script" not in text


def test_what_is_written_in_results_is_no_html(tmp_path):
    (tmp_path / "gqa_h100.json").write_text('[{"kind": "host", "peer": "<b>"}]', encoding="utf-8")
    text = perform.html([Section("one", "a < b", "", ("gqa_h100.json",))], tmp_path)
    assert "a &lt; b" in text
    assert "<td>&lt;b&gt;</td>" in text


def test_a_file_that_two_sections_are_of_is_tabulated_once():
    again = named(["prefill", "prefill-models"])
    assert perform.html(again).count("<h3>results/fmha_h200.json</h3>") == 1


def test_sections_are_named(run):
    listed = run("report.py --list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == [section.name for section in SECTIONS]
    assert "decode_h100.png" in listed[0]
    refused = run("report.py --list --only nothing")
    assert refused.returncode == 2
    assert "--only nothing: one of decode, " in refused.stderr


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_every_figure_is_tabulated(section):
    """Each line has as many cells as there are headings."""
    for name in section.files:
        document = read(name)
        found = tables_of(document)
        assert any(rows for _, _, rows in found)
        assert all(len(line) == len(heads) for _, heads, rows in found for line in rows)
        plain = [row for row in document.rows if "refused" not in row]
        if plain and name not in SPECIAL:
            assert sum(len(rows) for _, _, rows in found) == len(document.rows)


@pytest.mark.parametrize("name", sorted(name for name in COMMANDS if name.endswith(".json")))
def test_no_figure_of_a_row_is_left_out(name):
    """This covers kinds of rows without explicit columns."""
    document = read(name)
    heads = {head for _, heads, _ in tables_of(document) for head in heads}
    rows = [row for row in document.rows or document.data.get("rows", ())
            if row.get("kind") not in COLUMNS and name not in SPECIAL]  # fmt: skip
    figures = {key for row in rows for key, value in row.items() if isinstance(value, float)}
    assert figures <= heads


def test_figures_in_a_figure_are_named_by_their_way():
    ((_, heads, rows),) = tables_of(read("dsv4_layer_h200.json"))
    assert dict(zip(heads, rows[0], strict=True))["gpu_us_of_a_step, median"] == "1577"


# -- documents ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "gpu", "date"), [
    ("gqa_h100.json", "NVIDIA H100 80GB HBM3", "2026-11-21"),
    ("merge_h100.json", "NVIDIA H100", "2026-11-21"),
    ("eager_h200.json", "NVIDIA H200", UNKNOWN),
    ("emulator_speed.json", "Intel(R) Xeon(R) Processor @ 2.80GHz", "2026-11-30"),
    ("gqa_static.json", "a CPU", "2026-11-21"),
    ("model_b200_attention.json", "B200", UNKNOWN),
    ("published_fa4_b200.csv", UNKNOWN, UNKNOWN),
    ("ncu_h200.csv", "NVIDIA H200", "2026-11-27"),
])  # fmt: skip
def test_what_a_file_says_of_its_making(name, gpu, date):
    document = read(name)
    assert (document.gpu, document.date) == (gpu, date)


def test_the_setting_is_no_row():
    assert {row["kind"] for row in read("gqa_h100.json").rows} == {"latency", "host"}


# -- pictures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("draw", "document", "labels"), [
    (pictures.draw_decode, latencies(), "a GPU, 2026-11-21|8 query heads, 1 KV heads of 64, bf16"),
    (pictures.draw_prefill, attention(),
     "a GPU, 2026-11-21: bf16, 32 of 64 heads|head dim 64, causal"),
    (pictures.draw_models, attention(rows="gqa", kv_dtype="e4m3", window=127, sinks=True),
     "a GPU, 2026-11-21: bf16 with e4m3 keys|1 x 1k, 32/32 of 64\nwindow 128, sinks"),
    (pictures.draw_b200, modelled(),
     "on a B200: MODELLED|bf16, date not recorded|range over 12|4 x 8k, 32/2 heads|cuDNN, pub"),
    (moe.draw, layers(), "a GPU, 2026-11-21: activations bf16, weights mxfp4|random routing"),
    (moe.draw_modelled, layers_modelled(), "on a B200: MODELLED|Date not recorded|m, mxfp8"),
    (pictures.draw_gpt_oss, whole_model(),
     "a GPU, 2026-11-21: bf16, experts mxfp4, 64 query and 8 KV"),
    (steps.draw_steps, movements(),
     "a GPU, 2026-11-21: dtypes and heads as named|fp8_584|append"),
    (steps.draw_beside, cycles(), "MODELLED|a GPU, 2026-11-21, bf16|head dim 64, causal, pairs"),
    (latent.draw, latent_rows(), "one|0.50   7.0, 14.0|of FlashMLA's time"),
    (ncu.draw, launch(), "on one a GPU, 2026-11-21; one launch each. L2 cold|grid 8 x 4, block 1, "
     "12.2 us, 0 registers|Decode attention: gqa_decode_sm90_d128|tensor pipe|long scoreboard"),
    (cache.draw, story(), "layout of a model (fp8 entries)|first request\n40 tokens, 0 found"),
])  # fmt: skip
def test_pictures_have_their_labels(figure, draw, document, labels):
    _, words = figure(draw, document)
    missing = [label for label in labels.split("|") if label not in words]
    assert not missing, words


def test_a_far_point_of_decode_stands_at_the_edge_with_its_factor(figure):
    """The panel is scaled to the other points."""
    (axis,), words = figure(pictures.draw_decode, latencies())
    ends = {
        line.get_ydata()[0]: line.get_xdata()[-1]
        for line in axis.lines
        if len(line.get_xdata()) == 2
    }
    assert [ends[at] for at in range(4)] == [1.2, 1.5, 1.4, 1.5]
    assert "300 (30 x)" in words
    assert words.startswith("12.0 | 15.0")


def test_the_fastest_that_others_published_stands_beside(figure):
    """The published result is for the same GPU and problem, with the name of its source."""
    row = {"gpu": "a GPU", "batch": "1", "keys": "1024", "us": "13.0", "source": "engine 1.2 fa3"}
    others = [
        row | {"us": "14.0"},
        row | {"gpu": "B200", "us": "9"},
        row | {"keys": "8", "us": "1"},
    ]
    published = [row, *others]
    (axis,), words = figure(pictures.draw_decode, latencies(), published=published)
    assert "13.0 engine" in words
    assert "without flushing L2" in words
    assert "without flushing L2" not in figure(pictures.draw_decode, latencies())[1]
    assert axis.get_yticklabels()[-1].get_text() == "published by others"
    assert axis.lines[-1].get_xdata()[0] == 1.3


def test_only_timed_rows_of_their_own_length_are_lines(figure):
    (axis,), _ = figure(pictures.draw_prefill, attention(), roof=800.0)
    rates = sorted(line.get_ydata()[-1] for line in axis.lines)
    assert rates == [300, 431.2, 800.0]
    assert axis.get_ylim()[1] > 800


def test_ranges_of_the_model_are_drawn(figure):
    """50 us are 200 TFLOP/s: 100 us become 100, 40 us 250, and the published 106.5 us 94."""
    (axis,), _ = figure(pictures.draw_b200, modelled())
    drawn_at = [tuple(np.round(line.get_xdata())) for line in axis.lines]
    assert drawn_at[:3] == [(100, 250), (200,), (94,)]
    (axis,), words = figure(moe.draw_modelled, layers_modelled())
    assert [tuple(line.get_ydata()) for line in axis.lines[1:]] == [(1.6, 2.5), (2.0,)]
    assert "2.00" in words


def test_the_roofline_bends_where_memory_and_products_meet(figure):
    axes, words = figure(moe.draw, layers())
    roof = axes[0].lines[0]
    assert tuple(roof.get_xdata())[1] == 200  # 800 TFLOP/s at 4 TB/s
    assert tuple(roof.get_ydata()) == (20, 800, 80)
    assert "0.45" in words  # 5 of 11 us


def test_a_floor_and_its_factor(figure):
    axes, words = figure(pictures.draw_gpt_oss, whole_model())
    assert "3  (2.0 x)" in words
    assert [tuple(line.get_xdata()) for line in axes[0].lines] == [(1.5, 1.5)]


def test_steps_of_ours_alone_are_lines(figure):
    axes, _ = figure(steps.draw_steps, movements())
    assert [tuple(line.get_ydata()) for line in axes[0].lines[1:]] == [(0.5, 0.5)]


def test_modelled_beside_measured_with_a_shape_per_group(figure):
    rows = [{"group": group, "real_us": 2.0, "modelled_us": 2.2, "low_us": 2.0, "high_us": 2.5}
            for group in ("decode", "merge")]  # fmt: skip
    (axis,), words = figure(lambda path, found: subjects.draw(path, found, "title"), rows)
    shapes = [line.get_marker() for line in axis.lines if line.get_marker() not in ("None", "")]
    assert len({*shapes}) == 2
    assert "Title" in words


def test_the_busiest_unit_is_filled_and_the_longest_wait_first(figure):
    """Issuing is no wait of a warp. A unit that is nearly as busy is filled, too."""
    document = launch()
    document.rows[1][ncu.UNITS["L2"]] = "57.1"
    (left, right), words = figure(ncu.draw, document)
    assert [bar.get_width() for bar in left.patches] == [10, 10, 10, 57.1, 58.4]
    assert len({bar.get_facecolor() for bar in left.patches[:3]}) == 1
    assert len({bar.get_facecolor() for bar in left.patches[2:]}) == 2
    assert [bar.get_width() for bar in right.patches][:3] == [60, 10, 0]
    assert right.get_yticklabels()[0].get_text() == "long scoreboard"
    assert "cutlass" not in words
    assert "selected" not in [label.get_text() for label in right.get_yticklabels()]


def test_a_table_of_parameters_has_a_line_for_each():
    data = {"rows": "units.json", "parameters": {"clock": {"value": 1.98, "unit": "GHz"}}}
    ((_, heads, lines),) = tables_of(Document("rates.json", data=data))
    assert heads == ["parameter", "value", "unit"]
    assert lines == [["clock", "1.98", "GHz"]]


def test_metrics_of_ncu_are_lines_with_their_units():
    ((_, heads, lines),) = tables_of(read("ncu_h200.csv"))
    assert heads[:2] == ["metric", "unit"]
    assert [head.partition("_")[0] for head in heads[2:]] == [
        "gqa",
        "fmha",
        "moe",
        "kvcache",
        "fmha",
    ]
    assert ["gpu__time_duration.sum", "ns", "12128", "190592", "15616", "21312", "12960"] in lines


def test_holders_of_slots():
    found = story()
    assert [found.holder("blocks", slot) for slot in range(4)] == [
        "reserved", "both", "first", "second",
    ]  # fmt: skip
    assert [found.holder("states", slot) for slot in (1, 2)] == ["first", "second"]
    assert [found.holder("checkpoints", slot) for slot in (0, 1)] == ["kept", "free"]


def test_arrows_that_follow_from_others_are_left_out():
    packages = {"a": {"b", "c", "d"}, "b": {"c"}, "c": {"d"}, "d": set()}
    assert map.direct(packages) == {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": set()}


# -- style ----------------------------------------------------------------------------------------


def seen(colour: str) -> np.ndarray:
    """Colour from 0 to 255 as seen without green cones."""
    rgb = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.clip(WITHOUT_GREEN @ rgb**2.2, 0, 1)
    return 255 * linear ** (1 / 2.2)


@pytest.mark.parametrize(("colours", "peers"), [
    (6, ("decode", "decode pdl", "decode pdl kv-ready", "torch cudnn", "torch flash", "flex",
     "flashinfer xqa", "flashinfer trtllm-gen", "flashinfer fa2")),
    (6, ("fmha", "mma.sync", "fa4", "cudnn", "fa2", "flashinfer")),
    (5, ("moe", "moe-e4m3", "triton", "triton-plain", "torch")),
    (3, ("ours", "FlashAttention-4", "FROST")),
])  # fmt: skip
def test_kernels_of_a_picture_differ_in_shape_and_without_colour_vision(colours, peers):
    looks = [style.look(peer) for peer in peers]
    assert len({look.shape for look in looks}) == len(looks)
    assert len({look.colour for look in looks}) == colours  # those of one package may share one
    for one, other in itertools.combinations({look.colour for look in looks}, 2):
        assert np.linalg.norm(seen(one) - seen(other)) > 45, (one, other)


def test_kernels_without_a_look_of_their_own_have_different_ones():
    assert len({(look.shape, look.colour) for look in style.OTHERS}) == len(style.OTHERS)
    assert style.look("decode cluster=8", 1) == style.OTHERS[1]


def test_a_picture_is_the_same_every_time_and_says_what_it_is_of(tmp_path):
    for name in ("a.png", "b.png"):
        steps.draw_beside(tmp_path / name, cycles(), "fmha.json:12ab")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert style.source_of(tmp_path / "a.png") == "fmha.json:12ab"
    with Image.open(tmp_path / "a.png") as image:
        assert image.size[0] == 1600  # twice what a page shows
        assert {*image.info} <= {"Source", "transparency"}


# -- docs/ ----------------------------------------------------------------------------------------


def test_docs_has_the_pictures_of_the_report_and_pages_show_them():
    pictures = {path.name for path in DOCS.glob("*.png")}
    assert pictures == {section.docs for section in OF_DOCS} | {*ELSEWHERE}
    pages = "".join(path.read_text(encoding="utf-8") for path in
                    (*DOCS.glob("*.md"), *ROOT.glob("*/README.md"), ROOT / "README.md",
                     ROOT / "examples" / "gpt_oss" / "README.md"))  # fmt: skip
    links = re.findall(r"!\[[^\]]+\]\(([\w./]+)\)", pages)
    shown = {link.rpartition("/")[2] for link in links}
    assert pictures <= shown
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^!\[", readme, re.MULTILINE)) == 1


@pytest.mark.parametrize("section", [each for each in OF_DOCS if each.name != "map"],
                         ids=lambda section: section.name)  # fmt: skip
def test_pictures_of_docs_are_of_the_results_of_today(section):
    """`python scripts/report.py --docs` updates them."""
    source = section.source([read(name) for name in section.files])
    assert source
    assert style.source_of(DOCS / section.docs) == source


def test_the_whole_report(run, tmp_path):
    """Pictures are those of docs/; another matplotlib may draw letters slightly differently."""
    assert run("report.py --out", tmp_path).returncode == 0
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert {*re.findall(r'<img src="([^"]+)"', text)} == {p.name for p in tmp_path.glob("*.png")}
    assert all(f"results/{name}" in text for name in COMMANDS)
    for name in (section.docs for section in OF_DOCS):
        old, new = (np.asarray(Image.open(folder / name).convert("L"), int)
                    for folder in (DOCS, tmp_path))  # fmt: skip
        assert old.shape == new.shape, name
        assert np.mean(np.abs(old - new) > 64) < 0.01, name
