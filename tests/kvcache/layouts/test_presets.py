"""Layouts of named models: bytes published by papers and servers; values of config.json files."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvcache.layouts import presets
from kvcache.layouts.models import ConfigError, gqa
from kvcache.layouts.presets import CONFIGS, PRESETS, UNSUPPORTED, Options, from_config, preset
from lab.house.source import ROOT

MIB = 2**20
PRO = CONFIGS["deepseek-v4-pro"]


@pytest.mark.parametrize(("layout", "bytes_per_token"), [
    (presets.deepseek_v4_pro(), 5031),
    (presets.deepseek_v4_pro(record="fp8-index8"), 5511),
    (presets.deepseek_v4_pro(record="bf16"), 9848),
    (presets.deepseek_v4_flash(), 3514),
    (presets.deepseek_v41_flash(), 890),
    (presets.deepseek_v32(), 48068),
    (gqa(61, 8, 128), 249_856),
])  # fmt: skip
def test_published_bytes_per_token(layout, bytes_per_token):
    assert int(layout.bytes_per_token) == bytes_per_token


def test_published_bytes_of_blocks_and_states():
    assert presets.deepseek_v4_pro(record="bf16").block_payload == 1_260_544
    assert presets.deepseek_v4_pro().block_payload == 644_024
    assert presets.deepseek_v4_pro(block_tokens=256).block_payload == 2 * 644_024
    in_mib = presets.deepseek_v4_pro(record="bf16").state_payload / MIB
    assert in_mib == pytest.approx(25.5, abs=0.05)


@pytest.mark.parametrize(("name", "online", "parts", "total"), [
    ("deepseek-v4-pro", False, (4.35, 1.88, 0.47, 15.50), 22.2),
    ("deepseek-v4-pro", True, (4.35, 1.88, 0.47, 0.18), 6.9),
    ("deepseek-v4-flash", False, (3.07, 1.31, 0.33, 10.0), 14.7),
    ("deepseek-v4-flash", True, (3.07, 1.31, 0.33, 0.12), 4.8),
])  # fmt: skip
def test_published_bytes_of_a_state(name, online, parts, total):
    layout = preset(name, online_hca=online)
    ring = layout.find("swa")
    found = [ring.copies * ring.rows(0) * ring.record.bytes]
    found += [t.copies * t.page_bytes(0) for t in map(layout.find, TAILS)]
    assert sum(found) == layout.state_payload
    for mib, expected in zip(found, parts, strict=True):
        assert mib / MIB == pytest.approx(expected, abs=0.0051)
    assert layout.state_payload / MIB == pytest.approx(total, abs=0.051)


TAILS = ("csa_tail", "index_tail", "hca_tail")


def test_a_checkpoint_has_no_hca_tail_and_half_a_csa_window():
    """61 rings of 127 entries, 20 KiB of overlap in each of 30 CSA layers."""
    layout = presets.deepseek_v4_pro(record="bf16")
    assert layout.checkpoint_bytes == 61 * 127 * 1024 + 30 * 20 * 1024 + 64


def layers_of(layout, name):
    """Return {layer: copy} for the layers that read a stream."""
    of_layer = layout.find(name).of_layer
    assert len(of_layer) == layout.model_layers
    return {layer: copy for layer, copy in enumerate(of_layer) if copy is not None}


def test_layer_maps_of_v4():
    pro, flash = presets.deepseek_v4_pro(mtp=1), presets.deepseek_v4_flash()
    assert list(layers_of(pro, "hca")) == [0, 1, *range(3, 61, 2)]
    assert layers_of(pro, "csa") == {layer: k for k, layer in enumerate(range(2, 61, 2))}
    assert layers_of(flash, "csa") == {layer: k for k, layer in enumerate(range(2, 43, 2))}
    assert list(layers_of(flash, "hca")) == list(range(3, 43, 2))
    for layout, layers in ((pro, 62), (flash, 43)):
        assert layers_of(layout, "swa") == {layer: layer for layer in range(layers)}
        for name in ("index", "csa_tail", "index_tail"):
            assert layers_of(layout, name) == layers_of(layout, "csa")
        assert layers_of(layout, "hca_tail") == layers_of(layout, "hca")


def test_layer_maps_of_v41():
    layout = presets.deepseek_v41_flash(mtp=3)
    shared = {layer: (layer - 2) // 6 for layer in range(2, 20)}
    assert layers_of(layout, "main2") == layers_of(layout, "index2") == shared
    assert layers_of(layout, "main1") == dict.fromkeys(range(20, 40), 0)
    assert layers_of(layout, "tail2") == {2: 0, 8: 1, 14: 2}
    assert [tail.name for tail in layout.tails] == ["tail2"]
    assert layout.find("swa").copies == layout.model_layers == 43
    assert layout.find("swa").record.bytes == 528


def test_mtp_adds_a_window_to_v4_and_a_layer_to_v32():
    plain, more = presets.deepseek_v4_pro(), presets.deepseek_v4_pro(mtp=1)
    assert more.block_bytes == plain.block_bytes
    assert more.state_payload - plain.state_payload == 128 * 584
    assert int(presets.deepseek_v32(mtp=1).bytes_per_token) == 62 * (656 + 132)


def test_windowed_layers_of_a_gqa_model_are_rings():
    layout = preset("gpt-oss-120b")
    assert list(layers_of(layout, "k")) == list(range(1, 36, 2))
    assert list(layers_of(layout, "v_window")) == list(range(0, 36, 2))
    assert layout.find("k_window").window == 128
    assert layout.bytes_per_token == 18 * 2 * 8 * 64 * 2
    assert preset("gpt-oss-120b", record="fp8").bytes_per_token == 18 * 2 * 8 * 64


def test_planning_does_not_load_the_dsl():
    loaded = "'cutlass' in sys.modules"
    code = f"import sys, kvcache.layouts.presets, kvcache.planner.capacity; print({loaded})"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == "False\n", found.stderr


@pytest.mark.parametrize("name", CONFIGS)
def test_every_preset_makes_a_layout(name):
    layout = PRESETS[name](draft=3, block_tokens=256)
    assert (layout.name, layout.draft, layout.block_tokens) == (name, 3, 256)


def test_a_file_a_folder_and_its_text_part(tmp_path):
    (tmp_path / "model").mkdir()
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({"model_type": "vision", "text_config": PRO}), encoding="utf-8")
    for place in (path, str(path), path.parent):
        assert from_config(place, Options(draft=2)) == preset_as("model", draft=2)
    assert from_config(path, name="deepseek-v4-pro") == presets.deepseek_v4_pro()


def preset_as(name, **options):
    return from_config(PRO, Options(**options), name=name)


def test_three_draft_layers_behind_a_config_that_says_one():
    """The list decides, as in DeepSeek-V4's releases with DSpark."""
    config = {**PRO, "compress_ratios": [*PRO["compress_ratios"], 0, 0]}
    assert from_config(config, Options(mtp=3)).find("swa").copies == 64


def test_gemma_says_which_layers_by_a_pattern():
    config = {"num_hidden_layers": 12, "num_key_value_heads": 1, "head_dim": 256}
    layout = from_config({**config, "sliding_window": 512, "sliding_window_pattern": 6})
    assert list(layers_of(layout, "k")) == [5, 11]
    unused = from_config({**config, "sliding_window": 512, "use_sliding_window": False})
    assert len(layers_of(unused, "k")) == 12
    assert not unused.rings


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


V41, V32, GPT = (CONFIGS[n] for n in ("deepseek-v4.1-flash", "deepseek-v3.2", "gpt-oss-120b"))
LLAMA = {"num_hidden_layers": 2, "num_key_value_heads": 1, "hidden_size": 96}
FULL = ["full_attention"] * 36


@pytest.mark.parametrize(("config", "words"), [
    (without(PRO, "compress_ratios"), "compress_ratios is missing.*opposite phase"),
    ({**without(PRO, "compress_ratios"), "layer_types": ["sliding_attention"] * 61},
     "compress_ratios is missing"),
    ({**PRO, "compress_ratios": [4] * 60}, "60 entries, num_hidden_layers is 61"),
    ({**PRO, "compress_ratios": "4"}, "compress_ratios is '4', expected a list"),
    ({**PRO, "compress_ratios": [4] * 60 + [-4]}, r"compress_ratios\[60\] is -4"),
    ({**PRO, "compress_ratios": [4] * 60 + [8, 0]}, r"\[60\] is 8, expected 0, 4 or 128"),
    ({**PRO, "compress_ratios": [4] * 62}, r"compress_ratios\[61:\] are \[4\]"),
    ({**PRO, "compress_ratios": [0] * 62}, "are all 0, so nothing is in pages"),
    ({**PRO, "num_nextn_predict_layers": 2}, "is 2, but compress_ratios has 62 entries"),
    ({**PRO, "layer_types": ["heavily_compressed_attention"] * 61},
     r"layer_types\[2\] is 'heavily_compressed_attention', compress_ratios\[2\] is 4"),
    ({**PRO, "head_dim": 256}, "head_dim is 256, supported is 512"),
    ({**PRO, "index_head_dim": 64}, "index_head_dim is 64, supported is 128"),
    (without(PRO, "num_hidden_layers"), "num_hidden_layers is missing"),
    (without(PRO, "sliding_window"), "sliding_window is missing"),
    ({**PRO, "sliding_window": 0}, "sliding_window is 0, expected an integer of at least 1"),
    ({**V41, "kv_source_layer_ids": [2, 8, 14]}, "layer 20 has ratio 1.*layer 14 of ratio 2"),
    ({**V41, "kv_source_layer_ids": [8, 14, 20]}, "layer 2 has ratio 2.*is none"),
    ({**V41, "kv_source_layer_ids": [1, 2, 8, 14, 20]}, r"layers \[1\] have ratio 0"),
    ({**V41, "kv_source_layer_ids": [2, 8, 14, 20, 40]}, r"source layers \[40\].* has 40"),
    (without(V41, "kv_source_layer_ids"), "kv_source_layer_ids is missing"),
    ({**without(V41, "kv_source_layer_ids"), "model_type": "deepseek_v4"},
     r"\[2\] is 2, expected 0, 4 or 128"),
    (without(PRO, "head_dim"), "head_dim is missing"),
    (without(PRO, "index_head_dim"), "index_head_dim is missing"),
    ({**PRO, "num_key_value_heads": 2}, "num_key_value_heads is 2, supported is 1"),
    ({**V32, "kv_lora_rank": 256}, "kv_lora_rank is 256, supported is 512"),
    (without(V32, "qk_rope_head_dim"), "qk_rope_head_dim is missing"),
    ({**without(V32, "index_head_dim"), "index_topk": 2048}, "index_head_dim is missing"),
    ({"num_hidden_layers": 2, "head_dim": 64}, "num_key_value_heads is missing"),
    ({"num_hidden_layers": True}, "num_hidden_layers is True, expected an integer"),
    (LLAMA, "num_attention_heads is missing"),
    ({**LLAMA, "num_attention_heads": 5}, "hidden_size 96 is not a multiple of num_att.* 5"),
    ({**GPT, "layer_types": FULL[1:]}, "layer_types has 35 entries, num_hidden_layers is 36"),
    ({**GPT, "layer_types": "full"}, "layer_types is 'full', expected a list of strings"),
    ({**GPT, "layer_types": [*FULL[1:], "mamba"]}, r"layer_types\[35\] is 'mamba', expected one"),
    ({**GPT, "layer_types": ["sliding_attention"] * 36}, "all 36 layer_types are sliding"),
    (without(GPT, "sliding_window"), "sliding_window is missing"),
    (without(GPT, "layer_types"), "sliding_window is 128, but neither layer_types nor"),
    *(({**GPT, key: 1}, f"does not support {key} 1") for key in UNSUPPORTED),
])  # fmt: skip
def test_configs_that_cannot_be_read_name_key_and_value(config, words):
    with pytest.raises(ConfigError, match=words):
        from_config(config)


def test_files_that_cannot_be_read(tmp_path):
    for kind in (ConfigError, FileNotFoundError):
        with pytest.raises(kind, match=r"nowhere\.json: no such file"):
            from_config(tmp_path / "nowhere.json")
    for text, words in (("{", "not JSON"), ("[]", "holds a JSON list")):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=words):
            from_config(tmp_path)


@pytest.mark.parametrize(("name", "options", "words"), [
    ("deepseek-v5", {}, "'deepseek-v5': presets are deepseek-v4-pro, "),
    ("deepseek-v4-pro", {"record": "fp4"}, "record 'fp4', one of .'fp8', 'fp8-index8', 'bf16'"),
    ("deepseek-v4-pro", {"block_tokens": 64}, "128 tokens does not divide a block of 64"),
    ("deepseek-v4-pro", {"mtp": 2}, "mtp 2, the model has 0 to 1 draft layers"),
    ("deepseek-v4.1-flash", {"online_hca": True}, "online_hca, but none of the ratios"),
    ("deepseek-v3.2", {"online_hca": True}, "online_hca, but an MLA cache has no HCA"),
    ("deepseek-v3.2", {"mtp": 2}, "mtp 2, num_nextn_predict_layers is 1"),
    ("llama-3.1-70b", {"mtp": 1}, "mtp 1: for DeepSeek's layers"),
    ("llama-3.1-70b", {"record": "fp4"}, "record 'fp4', one of .'bf16', 'fp8'"),
])  # fmt: skip
def test_options_that_a_model_does_not_have(name, options, words):
    with pytest.raises(ValueError, match=words):
        preset(name, **options)


@pytest.mark.parametrize(("arguments", "words"), [
    ({"windowed": [True]}, "marks 1 layers, the model has 2"),
    ({"windowed": [True, False]}, "a window of 0 tokens"),
    ({"windowed": [True, True], "window": 8}, "all 2 layers are windowed"),
    ({"element_bytes": 3}, "elements of 3 bytes"),
])  # fmt: skip
def test_gqa_refuses_what_makes_no_cache(arguments, words):
    with pytest.raises(ValueError, match=words):
        gqa(2, 1, 64, **arguments)
