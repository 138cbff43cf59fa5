"""Layouts from the numbers of a model: DeepSeek-V4, DeepSeek-V4.1, MLA with an indexer, plain GQA.

`presets.py` reads a config.json, and has models with a name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from kvcache.checks import require, whole
from kvcache.layouts.layout import MAX_COPIES, MAX_TOKENS, Layout, Ring, Stream, Tail
from kvcache.layouts.records import (
    BF16_512,
    FP4_288,
    FP8_528,
    FP8_584,
    FP8_656,
    INDEXER_BF16,
    INDEXER_FP4,
    INDEXER_FP8,
    Record,
    plain,
)

MAX_LAYERS = MAX_COPIES  # of a model
CSA, HCA = 4, 128  # tokens to an entry, as compress_ratios spells the two kinds of layers
BLOCK_TOKENS = 128  # the least common multiple of the two

# record option -> the main entry, its ring's, and the indexer's
Records = dict[str, tuple[Record, Record, Record]]
V4_RECORDS: Records = {
    "fp8": (FP8_584, FP8_584, INDEXER_FP4),
    "fp8-index8": (FP8_584, FP8_584, INDEXER_FP8),
    "bf16": (BF16_512, BF16_512, INDEXER_BF16),
}
V41_RECORDS: Records = {
    "fp4": (FP4_288, FP8_528, INDEXER_FP4),
    "fp8": (FP8_528, FP8_528, INDEXER_FP4),
    "bf16": (BF16_512, BF16_512, INDEXER_BF16),
}
MLA_BF16 = Record("bf16_576", 2 * (512 + 64))
MLA_RECORDS: Records = {
    "fp8": (FP8_656, FP8_656, INDEXER_FP8),
    "bf16": (MLA_BF16, MLA_BF16, INDEXER_BF16),
}
ELEMENT_BYTES = {"bf16": 2, "fp8": 1}  # of plain keys and values
HEAD_DIM, ROPE_DIM, INDEX_DIM = 512, 64, 128  # what the records above are made for


class ConfigError(ValueError):
    """A config.json that lacks a key, contradicts itself, or asks for what no cache here has."""


class NoConfig(ConfigError, FileNotFoundError):
    """A config.json that is not there."""


@dataclass(frozen=True)
class Options:
    """Choices of the user of a model, apart from the model itself.

    record: record of the entries, "" for the first that the model has.
    draft: see Layout.
    mtp: number of the model's draft layers that have a cache, too.
    online_hca: tails of HCA layers hold the running softmax instead of all rows: 85 times less.
    """

    record: str = ""
    block_tokens: int = BLOCK_TOKENS
    draft: int = 0
    mtp: int = 0
    online_hca: bool = False

    def __post_init__(self) -> None:
        require("record", self.record, str)
        require("online_hca", self.online_hca, bool)
        for name in ("block_tokens", "draft", "mtp"):
            whole(name, getattr(self, name), None)

    def choice(self, name: str, offered: Collection[str]) -> str:
        """The record option; ValueError for one that is not offered."""
        chosen = self.record or next(iter(offered))
        if chosen not in offered:
            raise ValueError(f"{name}: record {chosen!r}, one of {tuple(offered)}")
        return chosen


def deepseek_v4(name: str, ratios: Sequence[int], window: int, options: Options) -> Layout:
    """compress_ratios of all layers, draft layers behind: 4 CSA, 128 HCA, 0 the window alone."""
    main, ring, index = V4_RECORDS[options.choice(name, V4_RECORDS)]
    for layer, ratio in enumerate(ratios):
        if ratio not in (0, CSA, HCA):
            raise ConfigError(
                f"{name}: compress_ratios[{layer}] is {ratio}, expected 0, {CSA} or {HCA}"
            )
    csa, hca = (_own(ratio == kind for ratio in ratios) for kind in (CSA, HCA))
    streams, tails = [], []
    if copies := _copies(csa):
        for stream, record in (("csa", main), ("index", index)):
            streams.append(Stream(stream, record, CSA, copies, of_layer=csa))
        for tail, width in (("csa_tail", HEAD_DIM), ("index_tail", INDEX_DIM)):
            tails.append(Tail(tail, CSA, width, copies, overlap=2, of_layer=csa))
    if copies := _copies(hca):
        online = options.online_hca
        streams.append(Stream("hca", main, HCA, copies, packed=True, of_layer=hca))
        tails.append(Tail("hca_tail", HCA, HEAD_DIM, copies, online=online, of_layer=hca))
    swa = Ring("swa", ring, window, len(ratios), tuple(range(len(ratios))))
    return _with_window(name, options, streams, swa, tails)


def deepseek_v41(
    name: str, ratios: Sequence[int], sources: Sequence[int], window: int, options: Options
) -> Layout:
    """Entries are made in the source layers, and layers behind read those of the nearest one.

    ratios: of all layers, draft layers behind; 0 for the window alone. An entry has `ratio` tokens,
    without overlap; a source of ratio 1 waits for nothing and has no tail. The indexer's keys are
    projected from the entries, one for one, so they need no tail either.
    """
    if options.online_hca:
        raise ValueError(f"{name}: online_hca, but none of the ratios {sorted({*ratios})} is HCA")
    main, ring, index = V41_RECORDS[options.choice(name, V41_RECORDS)]
    reads = _nearest_source(name, ratios, sources)
    streams, tails = [], []
    for ratio in sorted({*ratios} - {0}, reverse=True):
        own = [source for source in sorted(sources) if ratios[source] == ratio]
        of_layer = tuple(own.index(r) if r in own else None for r in reads)
        streams += [
            Stream(f"main{ratio}", main, ratio, len(own), of_layer=of_layer),
            Stream(f"index{ratio}", index, ratio, len(own), of_layer=of_layer),
        ]
        if ratio > 1:
            makes = tuple(own.index(x) if x in own else None for x in range(len(ratios)))
            tails.append(Tail(f"tail{ratio}", ratio, HEAD_DIM, len(own), of_layer=makes))
    swa = Ring("swa", ring, window, len(ratios), tuple(range(len(ratios))))
    return _with_window(name, options, streams, swa, tails)


def _with_window(
    name: str, options: Options, streams: Sequence[Stream], swa: Ring, tails: Sequence[Tail]
) -> Layout:
    """A model all of whose layers have a window beside what their kind keeps."""
    return Layout(
        name,
        options.block_tokens,
        tuple(streams),
        (swa,),
        tuple(tails),
        draft=options.draft,
        model_layers=swa.copies,
    )


def _nearest_source(
    name: str, ratios: Sequence[int], sources: Sequence[int]
) -> tuple[int | None, ...]:
    """Return for each layer the source whose entries it reads; raise ConfigError if impossible."""
    wrong = [source for source in sources if not 0 <= source < len(ratios)]
    if wrong:
        raise ConfigError(f"{name}: source layers {wrong}, but the model has {len(ratios)}")
    reads: list[int | None] = []
    for layer, ratio in enumerate(ratios):
        before = [source for source in sources if source <= layer]
        source = max(before, default=None)
        if ratio and (source is None or ratios[source] != ratio):
            found = "none" if source is None else f"layer {source} of ratio {ratios[source]}"
            raise ConfigError(
                f"{name}: layer {layer} has ratio {ratio}, but the nearest source layer is {found}"
            )
        reads.append(source if ratio else None)
    idle = [source for source in sources if not ratios[source]]
    if idle:
        raise ConfigError(f"{name}: source layers {idle} have ratio 0 and make no entries")
    return tuple(reads)


def mla(name: str, layers: int, options: Options, indexer: bool = True) -> Layout:
    """DeepSeek-V3.2 (with an indexer in every layer) and V3: one latent entry per token."""
    if options.online_hca:
        raise ValueError(f"{name}: online_hca, but an MLA cache has no HCA layers")
    main, _, index = MLA_RECORDS[options.choice(name, MLA_RECORDS)]
    total = layers + options.mtp
    every = tuple(range(total))
    streams = [Stream("mla", main, 1, total, of_layer=every)]
    if indexer:
        streams.append(Stream("index", index, 1, total, of_layer=every))
    return Layout(
        name, options.block_tokens, tuple(streams), draft=options.draft, model_layers=total
    )


def gqa(
    layers: int,
    heads: int,
    head_dim: int,
    *,
    element_bytes: int = 2,
    block_tokens: int = BLOCK_TOKENS,
    draft: int = 0,
    window: int = 0,
    windowed: Sequence[bool] = (),
    name: str = "gqa",
) -> Layout:
    """The layout of plain keys and values.

    Args:
        layers, heads, head_dim: of the model; heads of keys, as many of values.
        element_bytes: of an element of either, 1, 2 or 4.
        block_tokens, draft: see `Layout`.
        window: tokens that layers marked by `windowed` see; these have rings, the others pages.
        windowed: a truth value per layer; none for no such layers.

    Raises:
        ValueError: for numbers that make no cache, or where no layer has pages.
    """
    require("windowed", windowed, Sequence)
    require("name", name, str)
    whole(f"{name}: window", window, 0, MAX_TOKENS)
    whole(f"{name}: layers", layers, 1, MAX_LAYERS)
    marks = tuple(windowed) or (False,) * layers
    if len(marks) != layers:
        raise ValueError(f"{name}: `windowed` marks {len(marks)} layers, the model has {layers}")
    if any(marks) and window < 1:
        raise ValueError(f"{name}: windowed layers, but a window of {window} tokens, at least 1")
    if all(marks):
        raise ValueError(
            f"{name}: all {layers} layers are windowed; a cache has at least one layer in pages"
        )
    paged, ringed = _own(not mark for mark in marks), _own(marks)
    streams, rings = [], []
    for kind in ("k", "v"):
        record = plain(f"{kind}_{heads}x{head_dim}", heads, head_dim, element_bytes)
        streams.append(Stream(kind, record, 1, _copies(paged), of_layer=paged))
        if any(marks):
            rings.append(Ring(f"{kind}_window", record, window, _copies(ringed), ringed))
    return Layout(
        name, block_tokens, tuple(streams), tuple(rings), draft=draft, model_layers=layers
    )


def _own(marks: Iterable[bool]) -> tuple[int | None, ...]:
    """Return for each layer its copy, counted over the marked layers, or None."""
    found: list[int | None] = []
    count = 0
    for mark in marks:
        found.append(count if mark else None)
        count += bool(mark)
    return tuple(found)


def _copies(of_layer: Sequence[int | None]) -> int:
    return sum(copy is not None for copy in of_layer)
