"""Sections of the page, the files of each section, and the pictures that docs/ shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.house import map
from lab.house.graph import house
from lab.report import attention, cache, latent, moe, ncu, steps
from lab.report.documents import Document

Draw = Callable[[Path, Sequence[Document], str], None]


@dataclass(frozen=True)
class Section:
    """A heading of the page.

    words: what it shows.
    files: files in results/; the first one is drawn.
    draw: draws their documents, with a note of the source; None for tables only.
    docs: name of the picture in docs/, if pages show it.
    modelled: whether its figures are modelled.
    """

    name: str
    title: str
    words: str
    files: tuple[str, ...] = ()
    draw: Draw | None = None
    docs: str = ""
    modelled: bool = False
    note: Callable[[], str] | None = None

    def source(self, documents: Sequence[Document]) -> str:
        """Return the picture's source for its PNG: files with digests of their bytes, or the
        result of `note` if it has no file."""
        if self.note:
            return self.note()
        return " ".join(f"{each.name}:{each.digest}" for each in documents)


def _of(draw: Callable[[Path, Document, str], None]) -> Draw:
    """Figures of the first file alone."""
    return lambda path, documents, source: draw(path, documents[0], source)


def _decode(path: Path, documents: Sequence[Document], source: str) -> None:
    """Draw decode next to the published figures in the last file."""
    attention.draw_decode(path, documents[0], source, published=documents[-1].rows)


def _prefill(path: Path, documents: Sequence[Document], source: str) -> None:
    """The roof is that of the last file, where it has one."""
    attention.draw_prefill(
        path, documents[0], source, roof=documents[-1].head.get("tensor_tflops", 0.0)
    )


def _cache(path: Path, documents: Sequence[Document], source: str) -> None:
    cache.draw(path, cache.run(), source)


def _bringup(path: Path, documents: Sequence[Document], source: str) -> None:
    steps.draw_bringup(path, documents[0].data, source)


def _map(path: Path, documents: Sequence[Document], source: str) -> None:
    map.draw(path, house(), source)


OWN = "model_h100/"
SECTIONS = (
    Section(
        "decode",
        "Decode: time over the floor",
        "One more token for every request of a batch. The floor is the time to read the keys and "
        "values; a kernel cannot be much faster if nothing is in L2.",
        ("gqa_h100.json", "published_decode_rivals.csv"),
        _decode,
        "decode_h100.png",
    ),
    Section(
        "prefill",
        "Attention over many tokens",
        "Prompts of 1k to 16k tokens, compared with other kernels. The line is a large matrix "
        "product by torch on an H200 (moe_layers_h200.json).",
        ("fmha_h200.json", "moe_layers_h200.json"),
        _prefill,
        "fmha_h200.png",
    ),
    Section(
        "prefill-models",
        "Attention, shapes of models",
        "Windows and sinks of gpt-oss, grouped heads, heads of 192 and 512, and e4m3. From the "
        "same run as the section above.",
        ("fmha_h200.json",),
        _of(attention.draw_models),
        "fmha_models_h200.png",
    ),
    Section(
        "prefill-flashinfer",
        "Attention over many tokens on another H200, with FlashInfer",
        "Cards differ: five rounds on another card, with FlashInfer as a further peer.",
        ("fmha_h200_flashinfer.json", "moe_layers_h200.json"),
        _prefill,
    ),
    Section(
        "prefill-fp8",
        "Attention in e4m3 over many tokens",
        "Q, K and V in e4m3, compared with FlashAttention-3 and cuDNN.",
        ("fmha_fp8_h200.json",),
        _of(attention.draw_prefill),
    ),
    Section(
        "latent",
        "Attention to latent keys, with FlashMLA",
        "Dense and sparse attention of DeepSeek-V3.2, V4 and V4.1 for one token of each entry, and "
        "prompts. FlashMLA has no kernel for the records of V4.1 on Hopper.",
        ("mla_h200.json",),
        _of(latent.draw),
        "mla_h200.png",
    ),
    Section(
        "prefill-portable",
        "Attention with mma.sync",
        "The kernel for GPUs without wgmma and tcgen05, forced on an H200.",
        ("fmha_mma_sync_h200.json", "fmha_mma_sync_keys_h200.json"),
        _of(attention.draw_prefill),
        "fmha_mma_sync_h200.png",
    ),
    Section(
        "attention-b200",
        "Attention on a B200, modelled",
        "We have no B200. Machine code is replayed cycle by cycle; docs/cycle_model.md tells how "
        "accurate that is. Published figures are from others, mostly without clocks.",
        (
            "model_b200_attention.json",
            "published_attention_rivals.csv",
            "published_fa4_b200.csv",
            "published_fa4_gb200.csv",
            "published_fa4_gb300.csv",
        ),
        _of(attention.draw_b200),
        "attention_speed.png",
        modelled=True,
    ),
    Section(
        "moe",
        "Layers of experts: gpt-oss-120b",
        "Routing, products and the combination of one layer, bf16 by four bits.",
        ("moe_layers_h200.json",),
        _of(moe.draw),
        "moe_h200.png",
    ),
    Section(
        "moe-few",
        "Layers of experts with few rows: one launch, or steps",
        "All after the choice of experts is one launch for few rows; layers of five models.",
        ("moe_few_h200.json", "moe_layers_few_h200.json"),
    ),
    Section(
        "moe-peers",
        "Layers of experts: gpt-oss-120b, with Humming and Marlin",
        "Products and layers, bf16 or e4m3 by four bits; docs/peers.md explains the parts.",
        ("moe_peers_h200.json",),
        _of(moe.draw),
    ),
    Section(
        "moe-deepseek",
        "Layers of experts: DeepSeek-V3",
        "Routing, products and the combination of one layer, bf16 by NVFP4.",
        ("moe_layers_h200_deepseek.json",),
        _of(moe.draw),
    ),
    Section(
        "moe-b200",
        "Layers of experts on a B200, modelled",
        "Compared with the fastest published times. Those of small layers have the weights in L2; "
        "ours read them from memory.",
        ("model_b200_layers.json", "published_moe_rivals.csv", "moe_tiles_b200.json"),
        _of(moe.draw_modelled),
        "moe_speed.png",
        modelled=True,
    ),
    Section(
        "gpt-oss",
        "gpt-oss, a whole model",
        "Where the time of a step goes, compared with the floor of memory and tensor cores.",
        ("gpt_oss_h200.json",),
        _of(attention.draw_gpt_oss),
        "gpt_oss_h200.png",
    ),
    Section(
        "vllm",
        "vLLM on these kernels",
        "Tokens per second of gpt-oss-20b and Llama 8B in vLLM 0.33.0 without its extensions, and "
        "where the time of decode steps goes.",
        ("vllm_h200.json",),
    ),
    Section(
        "cache",
        "The paged cache",
        "Blocks, states and checkpoints after a run on a CPU.",
        (),
        _cache,
        "cache.png",
        note=cache.source,
    ),
    Section(
        "cache-steps",
        "Data movement of the cache",
        "Appending, gathering, copying and checksums.",
        ("kvcache_h100.json", "kvcache_host.json", "kvcache_tier_h100.json"),
        _of(steps.draw_steps),
        "kvcache_h100.png",
    ),
    Section(
        "moe-steps",
        "Steps around the products of experts",
        "Quantising, routing, permutation and combination.",
        ("moe_h200.json",),
        _of(steps.draw_steps),
    ),
    Section(
        "dsv4",
        "Sparse attention of DeepSeek-V4",
        "Compressors, queries, scores and top-k; a whole layer as a table.",
        ("dsv4_h100.json", "dsv4_layer_h200.json"),
        _of(steps.draw_steps),
    ),
    Section(
        "merge",
        "Merging parts of attention",
        "Compared with a copy of as many bytes.",
        ("merge_h100.json", "merge_stacked_h100.json"),
    ),
    Section(
        "q8-0",
        "Weights in Q8_0",
        "Repacking, products and dequantising.",
        ("q8_0_h200.json",),
    ),
    Section(
        "tuner",
        "The tuner compared with exhaustive search",
        "Cost of a choice of tiles: 110 random shapes, each with 3 to 113 candidates.",
        ("tuner_h200.json",),
        _of(steps.draw_tuner),
        "tuner_h200.png",
    ),
    Section(
        "ncu",
        "Results of Nsight Compute",
        "One launch of each of five kernels, with the problems of scripts/nsight.py; "
        "docs/profiling.md explains them.",
        ("ncu_h200.csv",),
        _of(ncu.draw),
        "ncu.png",
    ),
    Section(
        "cycle-model",
        "The cycle model compared with measurements",
        "Attention on Hopper, modelled without a fit to these rows, and the measured times of the "
        "other kernels (docs/cycle_model.md has their errors).",
        (
            "model_h200/fmha.json",
            *(f"{OWN}{name}.json" for name in (
                "gqa", "gqa_variants", "merge", "kvcache", "moe", "dsv4")),
            "published_mainloops_b200.csv",
        ),
        _of(steps.draw_beside),
        "cycle_model_h200.png",
        modelled=True,
    ),
    Section(
        "units",
        "Unit costs of Hopper",
        "Instructions, barriers, copies and launches: the parameters of the cycle model.",
        ("units_h100.json", "units_h200.json"),
    ),
    Section(
        "conformance",
        "The emulator compared with silicon",
        "The same programs with the same inputs, form by form.",
        ("conformance_h100.json",),
    ),
    Section(
        "emulator",
        "Speed of the emulator, and first calls",
        "Warp instructions per second of one core; host time of calls.",
        (
            "emulator_speed.json",
            "first_call_cpu.json",
            "first_call_h200.json",
            "eager_h200.json",
        ),
    ),
    Section(
        "toolchains",
        "The same kernels from several compilers",
        "Versions of CuTe DSL and its libraries: what compiles, registers and instructions, and "
        "times on a GPU.",
        ("toolchains_h200.json",),
    ),
    Section(
        "static",
        "Output of ptxas for the kernels, and errors of layers",
        "Registers, spills and instructions; nothing here is a time on a GPU.",
        ("gqa_static.json", "moe_static.json", "moe_models.json"),
    ),
    Section(
        "bringup",
        "What ran where",
        "Steps of a bring-up (docs/bringup.md): instructions, kernels, random problems, rates, on "
        "H200s and in the emulator, which is no evidence for a GPU.",
        (
            "bringup-NVIDIA_H200-2026-11-28.json",
            "bringup-NVIDIA_H200-2026-11-30.json",
            "bringup-sm_100a_emulator-2026-11-28.json",
            "bringup-sm_100a_emulator-2026-11-30.json",
        ),
        _bringup,
        "bringup.png",
    ),
    Section(
        "tests",
        "Coverage of the tests",
        "Numbers of tests by package and tier, and the pairs of options that they cover.",
        ("test_coverage.json",),
    ),
    Section(
        "map",
        "The map of the repository",
        "Imports of packages; docs/architecture.md explains it.",
        (),
        _map,
        "house.png",
        note=map.source,
    ),
)  # fmt: skip
# Pictures of docs/ that other commands draw, from what is not in results/.
ELSEWHERE = {
    "timeline.png": "scripts/emulate.py fmha, whose trace is a run of the emulator",
    "cycle_model.png": "scripts/cycles.py beside, which models for minutes",
}


def named(names: Sequence[str]) -> list[Section]:
    """Sections of these names, or all. ValueError for a name that is none."""
    known = {section.name: section for section in SECTIONS}
    for name in names:
        if name not in known:
            raise ValueError(f"--only {name}: one of {', '.join(known)}")
    return [section for section in SECTIONS if not names or section.name in names]
