"""`report.py`: writes a page, its pictures, and the commands that make its figures."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.report.documents import RESULTS, Document, read
from lab.report.figures import tables_of
from lab.report.sections import Section, named
from lab.tools.common import refuse
from lab.tools.tables import Table

BENCH = "python scripts/bench.py"
OTHERS = "published by others"
COMMANDS = {
    "bringup-NVIDIA_H200-2026-11-28.json": "python scripts/bringup.py --gpus 0 1",
    "bringup-NVIDIA_H200-2026-11-30.json": "python scripts/bringup.py --only NAMES, all of mla",
    "bringup-sm_100a_emulator-2026-11-28.json": "python scripts/bringup.py --arch sm_100a "
    "--emulate",
    "bringup-sm_100a_emulator-2026-11-30.json": "python scripts/bringup.py --arch sm_100a "
    "--emulate --only NAMES, all of mla",
    "conformance_h100.json": "python scripts/conformance.py --accumulation aligned --json FILE",
    "dsv4_h100.json": f"{BENCH} dsv4 --json FILE",
    "dsv4_layer_h200.json": "python scripts/run.py dsv4 --experts 0 --steps 300 --json FILE",
    "eager_h200.json": f"{BENCH} eager --json FILE",
    "emulator_speed.json": f"{BENCH} emulator --json FILE",
    "first_call_cpu.json": f"{BENCH} first-call --json FILE",
    "first_call_h200.json": f"{BENCH} first-call --json FILE",
    "fmha_fp8_h200.json": f"{BENCH} fmha --rows e4m3 --rounds 3 --peers fmha fa3 cudnn-graph "
    "cudnn-graph-e4m3 --json FILE",
    "fmha_h200.json": f"{BENCH} fmha --rows anchor gpt-oss gqa mla hd512 fp8 --json FILE",
    "fmha_h200_flashinfer.json": f"{BENCH} fmha --rows anchor gpt-oss gqa mla fp8 --rounds 5 "
    "--json FILE",
    "fmha_mma_sync_h200.json": f"{BENCH} fmha --peers mma.sync fa2 --json FILE",
    "fmha_mma_sync_keys_h200.json": "means of launches behind each other (docs/portable.md)",
    "gpt_oss_h200.json": "python -m examples.gpt_oss --profile --json FILE",
    "gqa_h100.json": f"{BENCH} gqa --json FILE",
    "gqa_static.json": "python scripts/dump.py gqa --grid --json FILE",
    "kvcache_h100.json": f"{BENCH} kvcache --json FILE",
    "kvcache_host.json": f"{BENCH} kvcache-host --json FILE",
    "kvcache_tier_h100.json": f"{BENCH} kvcache-tier --json FILE",
    "vllm_h200.json": "vLLM's Python without its extensions (notes/engines.md)",
    "merge_h100.json": f"{BENCH} merge --json FILE, by an earlier form of it",
    "merge_stacked_h100.json": f"{BENCH} merge --json FILE, by an earlier form of it",
    "model_b200_attention.json": "python scripts/cycles.py fmha --peers --perturbed 12 --json FILE",
    "model_b200_layers.json": "python scripts/cycles.py layers --json FILE",
    "model_h100/dsv4.json": f"{BENCH} dsv4 --json FILE",
    "model_h100/gqa.json": f"{BENCH} gqa --json FILE",
    "model_h100/gqa_variants.json": f"{BENCH} gqa --tune cluster=8 --json FILE, and other clusters",
    "model_h100/kvcache.json": f"{BENCH} kvcache --json FILE",
    "model_h100/merge.json": f"{BENCH} merge --json FILE",
    "model_h100/moe.json": f"{BENCH} moe --json FILE",
    "model_h200/fmha.json": "ncu; modelled by python scripts/cycles.py beside FILE --perturbed 4",
    "mla_h200.json": f"{BENCH} mla --peers mla 'mla pdl' flashmla --json FILE, in four calls",
    "moe_h200.json": f"{BENCH} moe --json FILE",
    "moe_layers_h200.json": f"{BENCH} moe --model gpt-oss-120b --json FILE",
    "moe_layers_h200_deepseek.json": f"{BENCH} moe --model deepseek-v3 --json FILE",
    "moe_few_h200.json": "graphs of plans with few_rows True and False (notes/moe.md)",
    "moe_layers_few_h200.json": f"{BENCH} moe --model gpt-oss-120b --tokens 1 8 64 1k 4k 16k "
    "--rounds 2 --no-eager --json FILE",
    "moe_peers_h200.json": f"{BENCH} moe --model gpt-oss-120b --tokens 1 8 64 1k --no-eager "
    "--json FILE",
    "moe_models.json": "python scripts/run.py models --json FILE",
    "moe_static.json": "python scripts/dump.py moe --grid --json FILE",
    "moe_tiles_b200.json": "python notes/moe_tiles.py",
    "ncu_h200.csv": "ncu, as python scripts/nsight.py NAME starts it; slimmed by python "
    "scripts/nsight.py table EXPORTS --out FILE",
    "published_attention_rivals.csv": OTHERS,
    "published_decode_rivals.csv": OTHERS,
    "published_fa4_b200.csv": OTHERS,
    "published_fa4_gb200.csv": OTHERS,
    "published_fa4_gb300.csv": OTHERS,
    "published_mainloops_b200.csv": OTHERS,
    "published_moe_rivals.csv": OTHERS,
    "q8_0_h200.json": f"{BENCH} q8_0 --json FILE",
    "test_coverage.json": "make tiers",
    "toolchains_h200.json": f"{BENCH} toolchains --make FOLDER in each environment; {BENCH} "
    "toolchains FOLDERS --json FILE",
    "tuner_h200.json": "python -m kernelkit tune OPERATOR --random N --seed S --exhaustive --dry "
    "--json",
    "units_h100.json": f"{BENCH} units --json FILE",
    "units_h200.json": f"{BENCH} units --json FILE",
}


TEMPLATES = Path(__file__).parent
FEW = 24  # rows of a table that is shown at once


@dataclass(frozen=True)
class File:
    """File of a section: the document, what kind of figures it has, its command, its tables."""

    document: Document
    kind: str
    command: str
    tables: Sequence[Table]


@dataclass(frozen=True)
class Shown:
    """A section of the page; picture: the name of its PNG, nothing without one."""

    section: Section
    picture: str
    files: Sequence[File]


def shown(section: Section, earlier: set[str], folder: Path = RESULTS) -> Shown:
    """Return a section with tables of its files, except files shown in `earlier` sections."""
    files = []
    for name in section.files:
        if name not in earlier:
            document, command = read(name, folder), COMMANDS[name]
            files.append(File(document, kind_of(name), command, tables_of(document)))
    return Shown(section, picture_of(section), files)


def kind_of(name: str) -> str:
    """measured, modelled, published, or of a machine without a GPU: counted."""
    if COMMANDS[name] == OTHERS:
        return "published"
    modelled = name.startswith("model_b200") or name == "moe_tiles_b200.json"
    counted = name.endswith("_static.json") or name == "test_coverage.json"
    return "modelled" if modelled else "counted" if counted else "measured"


def picture_of(section: Section) -> str:
    """The name of its PNG: that of docs/, where it is shown there."""
    return section.docs or f"{section.name}.png" if section.draw else ""


def html(sections: Sequence[Section], folder: Path = RESULTS) -> str:
    """The page."""
    earlier: set[str] = set()
    found = []
    for section in sections:
        found.append(shown(section, earlier, folder))
        earlier |= {*section.files}
    return rendered(TEMPLATES / "page.html", sections=found, few=FEW)


def rendered(template: Path, **data: object) -> str:
    """A template, which may use those that are here. All that it is given is data, and nothing in
    that is HTML."""
    from jinja2 import Environment, FileSystemLoader

    folders = FileSystemLoader([template.parent, TEMPLATES], encoding="utf-8")
    environment = Environment(autoescape=True, loader=folders, keep_trailing_newline=True)
    return environment.get_template(template.name).render(**data)


DOCS = RESULTS.parent / "docs"
PAGE = "index.html"


def perform(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    try:
        sections = named(options.only)
    except ValueError as error:
        return refuse(error)
    if options.list:
        for section in sections:
            print(f"{section.name:18} {section.docs or '-':24} {section.title}")
        return 0
    if options.docs:
        for path in drawn([section for section in sections if section.docs], DOCS):
            print(f"wrote {path}")
        return 0
    for path in drawn(sections, options.out):
        print(f"wrote {path}")
    page = options.out / PAGE
    page.write_text(html(sections), encoding="utf-8")
    print(f"wrote {page}")
    return 0


def drawn(sections: Sequence[Section], folder: Path) -> list[Path]:
    """The PNGs of these sections, written to `folder`."""
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    for section in sections:
        if section.draw:
            documents = [read(name) for name in section.files]
            path = folder / picture_of(section)
            section.draw(path, documents, section.source(documents))
            written.append(path)
    return written
