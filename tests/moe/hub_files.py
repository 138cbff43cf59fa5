"""Checkpoints as on Hugging Face's hub, made by hand: names, shapes and dtypes are those of
openai/gpt-oss-*, of ModelOpt, of compressed-tensors and of DeepSeek-V4. Their values are decoded
here by a table.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat((E2M1, -E2M1)).double()
LAYER = "model.layers.3.mlp"
SCHEMES = ("modelopt", "compressed-tensors", "compressed-tensors mxfp4", "deepseek-v4")


def values(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Decode bytes [..., K / 2], with the even element in the low bits, and scales [..., K / block]
    in fp64 to fp64 [..., K]."""
    bits = data.view(torch.uint8).long()
    pairs = torch.stack((E2M1[bits & 15], E2M1[bits >> 4]), dim=-1).flatten(-2)
    return (pairs.unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)


def powers(codes: torch.Tensor) -> torch.Tensor:
    """Decode codes of ue8m0 to fp64."""
    return torch.exp2(codes.view(torch.uint8).double() - 127)


def codes(generator: torch.Generator, *shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    """Random uint8 codes."""
    return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)


def gpt_oss(experts: int, hidden: int, intermediate: int) -> dict[str, torch.Tensor]:
    """The tensors of a layer of experts and its router."""
    generator, found = torch.Generator().manual_seed(0), {}
    for name, rows, k in (
        ("gate_up_proj", 2 * intermediate, hidden), ("down_proj", hidden, intermediate),
    ):  # fmt: skip
        key = f"{LAYER}.experts.{name}"
        found[f"{key}_blocks"] = codes(generator, experts, rows, k // 32, 16)
        found[f"{key}_scales"] = codes(generator, experts, rows, k // 32, low=123, high=127)
        found[f"{key}_bias"] = torch.randn(experts, rows, generator=generator).bfloat16()
    router = torch.randn(experts, hidden, generator=generator) * hidden**-0.5
    found[f"{LAYER}.router.weight"] = router.bfloat16()
    found[f"{LAYER}.router.bias"] = torch.randn(experts, generator=generator).bfloat16()
    return found


def matrix(scheme: str, rows: int, k: int, seed: int, factor: float) -> dict[str, torch.Tensor]:
    """Tensors of one matrix, with names that follow its own. factor: its global scale, decoded."""
    generator = torch.Generator().manual_seed(seed)
    data, block = codes(generator, rows, k // 2), 16 if "mxfp4" not in scheme else 32
    if scheme == "deepseek-v4":
        scales = codes(generator, rows, k // 32, low=120, high=124)
        return {"weight": data.view(torch.int8), "scale": scales.view(torch.float8_e8m0fnu)}
    scales = codes(generator, rows, k // block, low=40, high=72)
    if scheme == "compressed-tensors mxfp4":
        return {"weight_packed": data, "weight_scale": scales + 80}
    scales = scales.view(torch.float8_e4m3fn)
    if scheme == "modelopt":
        ends = {"weight_scale_2": torch.tensor(factor), "input_scale": torch.tensor(factor / 8)}
        return {"weight": data, "weight_scale": scales} | ends
    ends = {"weight_global_scale": 1 / factor, "input_global_scale": 8 / factor}
    ends = {name: torch.tensor([value]) for name, value in ends.items()}
    return {"weight_packed": data, "weight_scale": scales} | ends


def values_of(scheme: str, tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Values of a matrix, fp64 [rows, K]."""
    found = {key.removeprefix(name + "."): t for key, t in tensors.items() if key.startswith(name)}
    data = found.get("weight", found.get("weight_packed"))
    if scheme == "deepseek-v4":
        return values(data, powers(found["scale"]))
    if scheme == "compressed-tensors mxfp4":
        return values(data, powers(found["weight_scale"]))
    plain = values(data, found["weight_scale"].double())
    if scheme == "modelopt":
        return plain * found["weight_scale_2"].double()
    return plain / found["weight_global_scale"].double()


def experts_of(
    scheme: str,
    names: list[str],
    projections: tuple[str, ...],
    hidden: int,
    intermediate: int,
    unlike: tuple[int, ...] = (),
) -> dict[str, torch.Tensor]:
    """The tensors of experts. Global scales are powers of two; gate and up share one, except in the
    experts at the places `unlike`."""
    found: dict[str, torch.Tensor] = {}
    gate, up, down = projections
    for place, expert in enumerate(names):
        for seed, (name, rows, k) in enumerate((
            (gate, intermediate, hidden), (up, intermediate, hidden), (down, hidden, intermediate),
        )):  # fmt: skip
            factor = 2.0 ** -(3 + place + (name == down) + 2 * (name == up and place in unlike))
            tensors = matrix(scheme, rows, k, 3 * place + seed, factor)
            found |= {f"{expert}.{name}.{key}": tensor for key, tensor in tensors.items()}
    return found


def write(folder: Path, tensors: dict[str, torch.Tensor], files: int = 2) -> Path:
    """Write tensors to a folder: several files with an index, or one file without."""
    shards = [dict(list(tensors.items())[n::files]) for n in range(files)]
    names = [f"model-{n + 1:05}-of-{files:05}.safetensors" for n in range(files)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name)
    if files > 1:
        places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        text = json.dumps({"metadata": {}, "weight_map": places})
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return folder
