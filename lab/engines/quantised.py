"""Tiny models whose experts have four bits, in the layouts of checkpoints.

Beside each NAME the folder NAME_plain has the same weights dequantised, for transformers.

gpt_oss_mxfp4: blocks and scales as in openai/gpt-oss
gpt_oss_shares: the same with 160 rows, of which two ranks get 96 and 64
qwen3_moe_nvfp4: NVFP4 of ModelOpt
qwen3_moe_ct: NVFP4 of compressed-tensors
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from kernelkit.numerics import e2m1
from moe.formats import FORMATS
from moe.reference import encode_scale, quantise_blocks

SIZES: dict[str, Any] = {
    "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 512,
    "initializer_range": 0.1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "num_experts_per_tok": 2,
}  # fmt: skip
Tensors = dict[str, torch.Tensor]


def quantised(
    weight: torch.Tensor, fmt: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Quantise [rows, K]. Returns codes uint8 [rows, K / 2], scale codes uint8, the factor that
    values were multiplied by first (NVFP4), and the values that result, fp32."""
    form = FORMATS[fmt]
    factor = encode_scale(weight.abs().amax().reshape(1), fmt) if form.has_global else None
    data, scales = quantise_blocks(weight.float(), form, factor)
    data = data.view(torch.uint8)
    codes = torch.stack((data & 15, data >> 4), -1).flatten(-2)
    values = e2m1.values_of(codes).float() * scales.float().repeat_interleave(form.block, -1)
    return data, scales.view(torch.uint8), factor, values / (1 if factor is None else factor)


def _write(folder: Path, name: str, model: Any, about: Any, own: Tensors, plain: Tensors) -> None:
    """Write both folders. about: the quantization_config."""
    config = model.config
    config.architectures = [type(model).__name__]
    for place, tensors, described in ((name, own, about), (f"{name}_plain", plain, None)):
        config.quantization_config = described
        if described is None:
            del config.quantization_config
        config.save_pretrained(folder / place)
        whole = {key: value.contiguous() for key, value in tensors.items()}
        save_file(whole, folder / place / "model.safetensors", {"format": "pt"})


def gpt_oss(folder: Path, name: str) -> None:
    """Write a gpt-oss of random weights, biases and sinks."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **SIZES, intermediate_size=160 if "shares" in name else 192, sliding_window=24,
        num_local_experts=4, layer_types=["sliding_attention", "full_attention"], dtype="bfloat16",
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).bfloat16()
    own, plain = {}, {}
    for path, tensor in model.state_dict().items():
        if path.endswith("sinks"):
            tensor.copy_(torch.randn_like(tensor))
        elif path.endswith("_bias"):
            tensor.copy_(0.3 * torch.randn_like(tensor))
        if not path.endswith(("gate_up_proj", "down_proj")):
            own[path] = plain[path] = tensor
            continue
        parts = [quantised(expert, "mxfp4") for expert in tensor.mT]  # [out, in], as on disk
        own[f"{path}_blocks"] = torch.stack([part[0] for part in parts]).unflatten(-1, (-1, 16))
        own[f"{path}_scales"] = torch.stack([part[1] for part in parts])
        plain[path] = torch.stack([part[3] for part in parts]).mT.bfloat16()
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
            "lm_head"]  # fmt: skip
    about = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    _write(folder, name, model, about, own, plain)


_FOUR = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": 16}
_NVFP4 = {
    "targets": ["Linear"], "format": "nvfp4-pack-quantized",
    "weights": {**_FOUR, "dynamic": False, "strategy": "tensor_group"},
    "input_activations": {**_FOUR, "dynamic": "local", "strategy": "tensor_group"},
}  # fmt: skip
# name -> names of codes, scales, scale of a tensor and of activations; the quantization_config
QWEN: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "qwen3_moe_nvfp4": (
        ("weight", "weight_scale", "weight_scale_2", "input_scale"),
        {
            "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16,
            "ignore": ["lm_head", "*self_attn*", "*mlp.gate"],
        },
    ),
    "qwen3_moe_ct": (
        ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
        {
            "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
            "quantization_status": "compressed", "config_groups": {"group_0": _NVFP4},
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
        },
    ),
}  # fmt: skip


def qwen3_moe(folder: Path, name: str) -> None:
    """Write a Qwen3-MoE of random weights; each expert has tensors of its own."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **SIZES, intermediate_size=512, num_experts=4, moe_intermediate_size=128,
        norm_topk_prob=True, dtype="bfloat16",
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config).bfloat16()
    names, about = QWEN[name]
    own, plain = {}, {}
    for path, tensor in model.state_dict().items():
        if ".experts" not in path:
            own[path] = plain[path] = tensor
            continue
        layers = ("gate_proj", "up_proj") if "gate_up" in path else ("down_proj",)
        for number, expert in enumerate(tensor):
            for layer, part in zip(layers, expert.chunk(len(layers)), strict=True):
                place = f"{path.rpartition('.')[0]}.{number}.{layer}"
                data, scales, factor, values = quantised(part, "nvfp4")
                # ModelOpt stores what a value is multiplied by; the other one divides.
                inverse = factor if "global" in names[2] else 1 / factor[0]
                activation = torch.tensor([40.0]) if "global" in names[3] else torch.tensor(0.02)
                parts = (data, scales.view(torch.float8_e4m3fn), inverse, activation)
                own |= {f"{place}.{word}": x for word, x in zip(names, parts, strict=True)}
                plain[f"{place}.weight"] = values
    _write(folder, name, model, about, own, plain)


QUANTISED = {
    "gpt_oss_mxfp4": gpt_oss, "gpt_oss_shares": gpt_oss, **dict.fromkeys(QWEN, qwen3_moe),
}  # fmt: skip
