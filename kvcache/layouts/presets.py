"""Cache layouts that a model asks for, by its config.json or by the model's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kernelkit.compile.outside import FileError, json_file
from kvcache.checks import require
from kvcache.layouts.layout import Layout
from kvcache.layouts.models import (
    CSA,
    ELEMENT_BYTES,
    HCA,
    HEAD_DIM,
    INDEX_DIM,
    MAX_LAYERS,
    ROPE_DIM,
    ConfigError,
    NoConfig,
    Options,
    deepseek_v4,
    deepseek_v41,
    gqa,
    mla,
)

# ---- Layouts by config.json (Hugging Face names)
#
# What the file does not say is refused and not guessed; above all `compress_ratios`: where it is
# absent, transformers fills in a layer order whose phase is the opposite of the released models'.

MAX_NUMBER = (1 << 31) - 1  # of anything that a config counts
LAYER_TYPES = {"full_attention": False, "sliding_attention": True}  # -> windowed
V4_LAYER_TYPES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": CSA,
    "heavily_compressed_attention": HCA,
}
# What this cache has no page for: recurrent layers, and layers that differ in their heads.
UNSUPPORTED = (
    "attention_chunk_size",
    "attention_k_eq_v",
    "full_attention_interval",
    "global_head_dim",
    "hybrid_override_pattern",
    "indexer_types",
    "layers_block_type",
    "linear_attn_config",
    "num_global_key_value_heads",
    "num_kv_shared_layers",
)


class _Reader:
    """A config's keys; every failure names the file, the key, and its value."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self.name, self.values = name, values

    def has(self, *keys: str) -> bool:
        return any(self.values.get(key) is not None for key in keys)

    def fail(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.name}: {reason}")

    def count(self, key: str, least: int = 1, default: int | None = None) -> int:
        """An integer of at least `least`."""
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise self.fail(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.fail(f"{key} is {value!r}, expected an integer of at least {least}")
        most = MAX_LAYERS if key.endswith("_layers") else MAX_NUMBER
        if value > most:
            raise self.fail(f"{key} is an integer of {value.bit_length()} bits, at most {most}")
        return value

    def counts(self, key: str) -> list[int]:
        """A list of integers of at least 0."""
        values = self.values.get(key)
        if not isinstance(values, list) or not values:
            raise self.fail(f"{key} is {values!r}, expected a list with an integer per layer")
        for place, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise self.fail(f"{key}[{place}] is {value!r}, expected an integer of at least 0")
        return values

    def word(self, key: str) -> str:
        """A string, "" for none."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.fail(f"{key} is {value!r:.80}, expected a string")
        return value or ""

    def words(self, key: str) -> list[str]:
        """A list of strings; no list is an empty one."""
        values = self.values.get(key)
        values = [] if values is None else values
        if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
            raise self.fail(f"{key} is {values!r:.80}, expected a list of strings")
        return values

    def fixed(self, key: str, value: int, why: str) -> None:
        """The key has that value."""
        found = self.count(key)
        if found != value:
            raise self.fail(f"{key} is {found}, supported is {value}: {why}")


def from_config(
    config: str | Path | Mapping[str, Any], options: Options | None = None, *, name: str = ""
) -> Layout:
    """The layout of a model by its config.json.

    Args:
        config: the path of the file or of its folder, or what is in it.
        name: of the layout; by default that of the folder or the model's type.

    Raises:
        ConfigError: (a ValueError) where the file lacks a key or contradicts itself.
        ValueError: for options that the model does not have.
    """
    require("options", options, Options, optional=True)
    require("name", name, str)
    values, name = _load(config, name)
    options = options or Options()
    if isinstance(values.get("text_config"), Mapping):
        values = values["text_config"]
    reader = _Reader(name, values)
    unsupported = [key for key in UNSUPPORTED if values.get(key)]
    if unsupported:
        shown = ", ".join(f"{key} {values[key]!r:.60}" for key in unsupported)
        raise reader.fail(f"this cache does not support {shown}")
    if reader.word("model_type").startswith("deepseek_v4") or reader.has("compress_ratios"):
        return _v4(reader, options)
    if reader.has("kv_lora_rank"):
        return _mla(reader, options)
    return _gqa(reader, options)


def _load(config: str | Path | Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], str]:
    if isinstance(config, Mapping):
        return config, name or str(config.get("model_type", "config"))
    if not isinstance(config, str | Path):
        raise TypeError(
            f"config is {type(config).__name__}, expected a path, or a mapping of its contents"
        )
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json_file(path)
    except FileNotFoundError as error:
        raise NoConfig(f"{path}: no such file") from error
    except FileError as error:
        raise ConfigError(str(error)) from error
    return values, name or (path.parent.name if path.name == "config.json" else path.stem)


def _v4(reader: _Reader, options: Options) -> Layout:
    """DeepSeek-V4, and V4.1 where layers read the entries of source layers."""
    layers = reader.count("num_hidden_layers")
    if not reader.has("compress_ratios"):
        raise reader.fail(
            "compress_ratios is missing: it names the CSA and HCA layers. The layer_types that "
            "transformers derives without it have the opposite phase"
        )
    ratios = reader.counts("compress_ratios")
    _check_drafters(reader, ratios, layers, options)
    _check_layer_types(reader, ratios[:layers])
    fixed = f"the records are those of {HEAD_DIM} elements, {ROPE_DIM} of them RoPE"
    reader.fixed("head_dim", HEAD_DIM, fixed)
    reader.fixed("qk_rope_head_dim", ROPE_DIM, fixed)
    if reader.has("num_key_value_heads"):
        reader.fixed("num_key_value_heads", 1, "all heads share an entry")
    if not any(ratios):
        raise reader.fail(f"compress_ratios are all 0, so nothing is in pages: {ratios}")
    if any(ratio not in (0, HCA) for ratio in ratios):
        reader.fixed("index_head_dim", INDEX_DIM, f"the indexer's records have {INDEX_DIM}")
    ratios, window = ratios[: layers + options.mtp], reader.count("sliding_window")
    for key in ("kv_source_layer_ids", "kv_source_layers"):
        if reader.has(key):
            sources = reader.counts(key)
            return deepseek_v41(reader.name, ratios, sources, window, options)
    if reader.word("model_type").startswith("deepseek_v41"):
        raise reader.fail("kv_source_layer_ids is missing: the layers that make entries")
    return deepseek_v4(reader.name, ratios, window, options)


def _check_drafters(reader: _Reader, ratios: list[int], layers: int, options: Options) -> None:
    """Entries behind the layers' are those of draft layers, which have the window alone.

    V4's releases with three draft layers still say num_nextn_predict_layers 1: the list counts.
    """
    drafters = len(ratios) - layers
    if drafters < 0:
        raise reader.fail(
            f"compress_ratios has {len(ratios)} entries, num_hidden_layers is {layers}"
        )
    said = reader.count("num_nextn_predict_layers", 0, default=0)
    if drafters and said > drafters:
        raise reader.fail(
            f"num_nextn_predict_layers is {said}, but compress_ratios has {len(ratios)} entries "
            f"for {layers} layers and {drafters} draft layers"
        )
    if any(ratios[layers:]):
        raise reader.fail(
            f"compress_ratios[{layers}:] are {ratios[layers:]}, expected 0 for draft layers"
        )
    if not 0 <= options.mtp <= drafters:
        raise reader.fail(
            f"mtp {options.mtp}, the model has 0 to {drafters} draft layers "
            f"(compress_ratios beyond num_hidden_layers {layers})"
        )


def _check_layer_types(reader: _Reader, ratios: list[int]) -> None:
    """layer_types, where transformers wrote them, too, say the same."""
    kinds = reader.words("layer_types")
    for layer, (kind, ratio) in enumerate(zip(kinds, ratios, strict=False)):
        if V4_LAYER_TYPES.get(kind, ratio) != ratio:
            raise reader.fail(
                f"layer_types[{layer}] is {kind!r}, compress_ratios[{layer}] is {ratio}"
            )


def _mla(reader: _Reader, options: Options) -> Layout:
    """DeepSeek-V3.2 with an indexer in each layer, V3 without."""
    layers = reader.count("num_hidden_layers")
    fixed = f"the records are those of {HEAD_DIM} latent elements and {ROPE_DIM} of RoPE"
    reader.fixed("kv_lora_rank", HEAD_DIM, fixed)
    reader.fixed("qk_rope_head_dim", ROPE_DIM, fixed)
    indexer = reader.has("index_head_dim", "index_topk", "index_n_heads")
    if indexer:
        reader.fixed("index_head_dim", INDEX_DIM, f"the indexer's records have {INDEX_DIM}")
    drafters = reader.count("num_nextn_predict_layers", 0, default=0)
    if not 0 <= options.mtp <= drafters:
        raise reader.fail(f"mtp {options.mtp}, num_nextn_predict_layers is {drafters}")
    return mla(reader.name, layers, options, indexer)


def _gqa(reader: _Reader, options: Options) -> Layout:
    if options.online_hca or options.mtp:
        raise reader.fail(
            f"online_hca {options.online_hca} and mtp {options.mtp}: for DeepSeek's layers only; "
            "this model has plain keys and values"
        )
    layers, heads = reader.count("num_hidden_layers"), reader.count("num_key_value_heads")
    if reader.has("head_dim"):
        head_dim = reader.count("head_dim")
    else:
        hidden, query_heads = reader.count("hidden_size"), reader.count("num_attention_heads")
        head_dim, left = divmod(hidden, query_heads)
        if left:
            raise reader.fail(
                f"head_dim is missing, and hidden_size {hidden} is not a multiple of "
                f"num_attention_heads {query_heads}"
            )
    windowed = _windowed(reader, layers)
    return gqa(
        layers,
        heads,
        head_dim,
        element_bytes=ELEMENT_BYTES[options.choice(reader.name, tuple(ELEMENT_BYTES))],
        block_tokens=options.block_tokens,
        draft=options.draft,
        window=reader.count("sliding_window") if any(windowed) else 0,
        windowed=windowed,
        name=reader.name,
    )


def _windowed(reader: _Reader, layers: int) -> list[bool]:
    """Say for each layer whether it sees a window alone."""
    if reader.has("layer_types"):
        kinds = reader.words("layer_types")
        if len(kinds) != layers:
            raise reader.fail(
                f"layer_types has {len(kinds)} entries, num_hidden_layers is {layers}"
            )
        for layer, kind in enumerate(kinds):
            if kind not in LAYER_TYPES:
                raise reader.fail(
                    f"layer_types[{layer}] is {kind!r}, expected one of {tuple(LAYER_TYPES)}"
                )
        marks = [LAYER_TYPES[kind] for kind in kinds]
        if all(marks):
            raise reader.fail(f"all {layers} layer_types are sliding: nothing is in pages")
        return marks
    if not reader.has("sliding_window") or reader.values.get("use_sliding_window") is False:
        return [False] * layers
    if reader.has("sliding_window_pattern"):  # every so manyth layer sees everything
        every = reader.count("sliding_window_pattern", 2)
        return [bool((layer + 1) % every) for layer in range(layers)]
    raise reader.fail(
        f"sliding_window is {reader.values['sliding_window']!r}, but neither layer_types nor "
        "sliding_window_pattern names its layers; a model with windowed layers alone has nothing "
        "in pages"
    )


# ---- Layouts by name
#
# `preset("deepseek-v4-pro", draft=3)`, or `from_config("path/config.json", Options(draft=3))` for
# any other. Options:
#
#     record        V4: fp8 (584-byte entries, MXFP4 indexer), fp8-index8 (132-byte indexer), bf16;
#                   V4.1: fp4, fp8, bf16; V3.2 and V3: fp8, bf16; plain keys and values: bf16, fp8
#     block_tokens  of a block, a multiple of every ratio (128 with HCA layers)
#     draft         the most tokens of a step that may be taken back
#     mtp           draft layers whose cache is here, too; in V4 and V4.1 they have the window alone
#     online_hca    V4: tails of HCA layers hold [maximum, sum, value] instead of 128 rows
#
# V4.1-Flash: layer map and sources are those of its config.json as public code quotes it; the 890
# bytes of its paper follow from them. Not known from there: whether the served caches hold the
# window's entries in 528 bytes in every layer (taken so here: the model quantises them to FP8 in
# groups of 32), and how many rows its compressor keeps (here: the `ratio` that it averages over,
# without overlap).

__all__ = ["CONFIGS", "PRESETS", "ConfigError", "Options", "from_config", "gqa", "preset"]

_DEEPSEEK = {
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "sliding_window": 128,
}

# Keys as in the models' config.json files; what the cache does not depend on is left out.
CONFIGS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "deepseek-v4-pro": {
            **_DEEPSEEK,
            "model_type": "deepseek_v4",
            "num_hidden_layers": 61,
            "num_nextn_predict_layers": 1,
            "compress_ratios": [HCA, *[HCA, CSA] * 30, 0],
        },
        "deepseek-v4-flash": {
            **_DEEPSEEK,
            "model_type": "deepseek_v4",
            "num_hidden_layers": 43,
            "num_nextn_predict_layers": 1,
            "compress_ratios": [0, 0, CSA, *[HCA, CSA] * 20, 0],
        },
        "deepseek-v4.1-flash": {
            **_DEEPSEEK,
            "model_type": "deepseek_v41_text",
            "num_hidden_layers": 40,
            "num_nextn_predict_layers": 3,
            "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
            "kv_source_layer_ids": [2, 8, 14, 20],
        },
        "deepseek-v3.2": {
            "model_type": "deepseek_v32",
            "num_hidden_layers": 61,
            "num_nextn_predict_layers": 1,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "index_head_dim": 128,
        },
        "llama-3.1-70b": {
            "model_type": "llama",
            "num_hidden_layers": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        "gpt-oss-120b": {
            "model_type": "gpt_oss",
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 18,
        },
    }
)


def preset(name: str, **options: Any) -> Layout:
    """The layout of a model by its name; options: the fields of `Options`.

    Raises:
        ValueError: for another name, with those that there are, or an option that it does not have.
    """
    require("name", name, str)
    if name not in CONFIGS:
        raise ValueError(f"{name!r}: presets are {', '.join(CONFIGS)}")
    return from_config(CONFIGS[name], Options(**options), name=name)


PRESETS: MappingProxyType[str, Callable[..., Layout]] = MappingProxyType(
    {name: partial(preset, name) for name in CONFIGS}
)
"""Functions that make the layouts of known models, by the name of the model."""
deepseek_v4_pro = PRESETS["deepseek-v4-pro"]
deepseek_v4_flash = PRESETS["deepseek-v4-flash"]
deepseek_v41_flash = PRESETS["deepseek-v4.1-flash"]
deepseek_v32 = PRESETS["deepseek-v3.2"]
