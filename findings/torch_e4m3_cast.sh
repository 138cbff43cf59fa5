#!/usr/bin/env bash
# torch 2.12.1 and 2.13.0 disagree about `x.to(torch.float8_e4m3fn)` above the largest finite value, on a CPU.
#
# 2.12.1: what would round above 448 becomes NaN, infinity too.
# 2.13.0: it becomes 448 with its sign, infinity too; NaN stays NaN.
# float8_e5m2 and the fnuz types behave the same in both versions: e5m2 gives infinity, fnuz gives NaN.
#
# A writer of FP8 that relies on the NaN to notice an overflow, or that reads a stored 448 as "in range", changes its
# meaning with the version of torch, and no error or warning says so. Clamp before the cast, and check for infinities.
#
# Output seen on 2026-11-28:
#   2.12.1+cu130 e4m3fn [448.0, 448.0, nan, nan, nan, nan, nan] e5m2 [448.0, 448.0, 448.0, inf, inf, -inf, nan]
#   2.13.0+cpu e4m3fn [448.0, 448.0, 448.0, 448.0, 448.0, -448.0, nan] e5m2 [448.0, 448.0, 448.0, inf, inf, -inf, nan]
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
cat > "$work/cast.py" <<'PY'
import torch
x = torch.tensor([448.0, 464.0, 465.0, 1e9, float("inf"), float("-inf"), float("nan")])
cast = {name: x.to(getattr(torch, f"float8_{name}")).float().tolist() for name in ("e4m3fn", "e5m2")}
print(torch.__version__, *(f"{name} {values}" for name, values in cast.items()))
PY
seen() {  # VERSION: the line that this version prints
    python3 -m venv "$work/$1"
    "$work/$1/bin/python" -m pip install --quiet --no-compile "torch==$1" numpy==2.4.6 2>"$work/pip.log" \
        || { cat "$work/pip.log"; exit 2; }
    "$work/$1/bin/python" "$work/cast.py"
}
before=$(seen 2.12.1); after=$(seen 2.13.0)
printf '%s\n%s\n' "$before" "$after"
[[ $before == *"e4m3fn [448.0, 448.0, nan, nan, nan, nan, nan]"* ]]
[[ $after == *"e4m3fn [448.0, 448.0, 448.0, 448.0, 448.0, -448.0, nan]"* ]]
[[ ${before#* e5m2} == "${after#* e5m2}" ]]
