#!/usr/bin/env bash
# transformers 5.24.0, block-wise FP8 checkpoints with dequantize=True: wrong weights where
# rows are no multiple of the block.
#
# A checkpoint with weight_block_size [128, 128] stores ceil(rows / 128) x ceil(columns / 128) scales; its last block is
# smaller where a size is no multiple of 128. The loader derives the block from the shapes instead (rows // scale rows).
# 192 rows with 2 scales become two blocks of 96: rows 96 to 127 are multiplied by the scale of the next block. It loads
# without an error and without a warning. 320 rows with 3 scales do not divide and raise. DeepSeek's
# kv_a_proj_with_mqa (576 rows, 5 scales) is of the second kind.
#
# Output seen on 2026-11-28 (torch 2.13.0+cpu, accelerate 1.15.0, safetensors 0.8.0), relative error of a weight:
#   intermediate size 256: 0.000
#   intermediate size 192: 0.546
#   intermediate size 320: RuntimeError
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/v"
"$work/v/bin/python" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 \
    safetensors==0.8.0 numpy==2.4.6 2>"$work/pip.log" || { cat "$work/pip.log"; exit 2; }
cat > "$work/load.py" <<'PY'
import json
import pathlib
import sys
import tempfile

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM

BLOCK = 128
NAME = "model.layers.0.mlp.gate_proj.weight"


def quantised(w):
    """FP8 codes, a scale for each block of 128 x 128, and the values that they stand for."""
    codes, back = torch.empty_like(w, dtype=torch.float8_e4m3fn), torch.empty_like(w)
    scales = torch.empty(-(-w.shape[0] // BLOCK), -(-w.shape[1] // BLOCK))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            tile = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            scales[i, j] = w[tile].abs().max() / 448
            codes[tile] = (w[tile] / scales[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
            back[tile] = codes[tile].float() * scales[i, j]
    return codes, scales, back


def loaded_error(rows):
    config = LlamaConfig(
        hidden_size=256, intermediate_size=rows, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=64, architectures=["LlamaForCausalLM"],
    )
    fields, want = {}, {}
    for name, w in LlamaForCausalLM(config).float().state_dict().items():
        if "proj" not in name:
            fields[name] = w.bfloat16().contiguous()
            continue
        w = w.clone()
        w[BLOCK:] *= 8  # blocks of different magnitude, as in a trained matrix
        fields[name], fields[name + "_scale_inv"], want[name] = quantised(w)
    quantization = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    with tempfile.TemporaryDirectory() as folder:
        save_file(fields, f"{folder}/model.safetensors", {"format": "pt"})
        text = json.dumps(config.to_dict() | {"quantization_config": quantization}, default=str)
        pathlib.Path(folder, "config.json").write_text(text)
        options = FineGrainedFP8Config(dequantize=True, weight_block_size=(BLOCK, BLOCK))
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=options, dtype=torch.float32)
        except RuntimeError as problem:
            return type(problem).__name__
    got = model.state_dict()[NAME].float()
    return f"{((got - want[NAME]).norm() / want[NAME].norm()).item():.3f}"


torch.manual_seed(0)
seen = {rows: loaded_error(rows) for rows in (256, 192, 320)}
for rows, what in seen.items():
    print(f"intermediate size {rows}: {what}")
silent = seen[192] != "RuntimeError" and float(seen[192]) > 0.1
sys.exit(0 if seen[256] == "0.000" and silent and seen[320] == "RuntimeError" else 1)
PY
"$work/v/bin/python" "$work/load.py" 2>/dev/null
