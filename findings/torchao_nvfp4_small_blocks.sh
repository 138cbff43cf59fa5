#!/usr/bin/env bash
# torchao 0.18.0, NVFP4Tensor.to_nvfp4: scale factors of blocks never fall below 2^-6, although e4m3 goes down to 2^-9.
#
# Without a per-tensor scale (the default of to_nvfp4) a block of 16 whose largest magnitude is below 6 * 2^-6 = 0.094
# is divided by 2^-6 instead of by its own scale factor, so it uses only the lowest steps of e2m1. Weights of ordinary
# size lose most of their digits: at a standard deviation of 0.01 the error is 23 % of the norm where the same format,
# with the subnormal numbers of e4m3 as scale factors, has 13 %; at 0.005 it is 45 % instead of 13 %.
# With a per-tensor scale (per_tensor_amax_to_scale) the error is 9.6 % throughout, but the same limit then
# applies between rows: one row 1e5 times as large raises the error of all other rows from 10 to 27 %.
# Nothing warns. Pass per_tensor_scale for weights.
#
# Output seen on 2026-11-28 (torch 2.13.0+cpu):
#   std 0.1: single level 0.096, subnormal scale factors 0.096, two levels 0.096
#   std 0.02: single level 0.130, subnormal scale factors 0.104, two levels 0.096
#   std 0.01: single level 0.226, subnormal scale factors 0.126, two levels 0.095
#   std 0.005: single level 0.450, subnormal scale factors 0.131, two levels 0.095
#   one row x 100000: the other rows with two levels 0.266
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/v"
"$work/v/bin/python" -m pip install --quiet --no-compile torch==2.13.0 torchao==0.18.0 numpy==2.4.6 2>"$work/pip.log" \
    || { cat "$work/pip.log"; exit 2; }
cat > "$work/blocks.py" <<'PY'
import sys

import torch
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6.0])
LEVELS = torch.cat([-LEVELS.flip(0), LEVELS])


def error(got, want):
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


def torchao(w, **scale):
    return NVFP4Tensor.to_nvfp4(w, **scale).dequantize(torch.float32)


def two_levels(w):
    return torchao(w, per_tensor_scale=per_tensor_amax_to_scale(w.abs().amax().float()))


def subnormal(w):
    """The same format with the scale factor that e4m3 has for each block, subnormal ones included."""
    blocks = w.float().view(-1, 16)
    scale = (blocks.abs().amax(1, keepdim=True) / 6).to(torch.float8_e4m3fn).float()
    scale = torch.where(scale == 0, 1.0, scale)
    nearest = (blocks / scale).unsqueeze(-1).sub(LEVELS).abs().argmin(-1)
    return (LEVELS[nearest] * scale).view_as(w)


torch.manual_seed(0)
rows = {}
for std in (0.1, 0.02, 0.01, 0.005):
    w = (torch.randn(64, 1024) * std).bfloat16()
    rows[std] = error(torchao(w), w), error(subnormal(w), w), error(two_levels(w), w)
    names = "single level", "subnormal scale factors", "two levels"
    print(f"std {std:g}: " + ", ".join(f"{n} {e:.3f}" for n, e in zip(names, rows[std])))
w = torch.randn(64, 1024).bfloat16()
w[5] *= 1e5
others = [row for row in range(64) if row != 5]
outlier = error(two_levels(w)[others], w[others])
print(f"one row x 100000: the other rows with two levels {outlier:.3f}")
as_described = rows[0.01][0] > 0.2 > 0.15 > rows[0.01][1] and rows[0.005][0] > 0.4 and outlier > 0.25
sys.exit(0 if as_described and all(r[2] < 0.1 for r in rows.values()) else 1)
PY
"$work/v/bin/python" "$work/blocks.py" 2>/dev/null
