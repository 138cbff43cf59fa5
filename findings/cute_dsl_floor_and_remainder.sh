#!/usr/bin/env bash
# nvidia-cutlass-dsl 4.8.1: `//` rounds down, but `%` is the remainder of a division that rounds towards zero.
#
# For an Int32 of mixed sign, b * (a // b) + a % b is therefore not a: -7 // 2 is -4 and -7 % 2 is -1, which add up to
# -9. In Python, and for compile-time constants in the same function, -7 % 2 is 1. So an index that is computed by `//`
# and `%` from a coordinate that can be negative (a halo, a window's left edge) names another element as soon as the
# coordinate is no constant any more. Nothing warns. Add a multiple of the divisor before dividing, or use
# a - b * (a // b) for the remainder.
# The script runs a host function (@cute.jit), so it needs no GPU. Device code behaves in the same way.
#
# Output seen on 2026-11-29:
#   -7 by  2: quotient -4, remainder -1, b q + r = -9; constants: -4 and 1
#    7 by -2: quotient -4, remainder 1, b q + r = 9; constants: -4 and -1
#   -7 by -2: quotient 3, remainder -1, b q + r = -7; constants: 3 and -1
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/v"
"$work/v/bin/python" -m pip install --quiet --no-compile nvidia-cutlass-dsl==4.8.1 2>"$work/pip.log" \
    || { cat "$work/pip.log"; exit 2; }
cat > "$work/divide.py" <<'PY'
import cutlass
import cutlass.cute as cute
from cutlass import Int32

PAIRS = ((-7, 2), (7, -2), (-7, -2))


@cute.jit
def dynamic(a: Int32, b: Int32):
    cute.printf("%d %d\n", a // b, a % b)


@cute.jit
def constant(a: cutlass.Constexpr, b: cutlass.Constexpr):
    cute.printf("%d %d\n", Int32(a // b), Int32(a % b))


for pair in PAIRS:
    dynamic(*map(Int32, pair))
    constant(*pair)
PY
cd "$work"
v/bin/python divide.py > out.txt
v/bin/python - <<'PY'
import sys

rows = [tuple(map(int, line.split())) for line in open("out.txt") if line.strip()]
as_seen = len(rows) == 6
for (a, b), (q, r), plain in zip(((-7, 2), (7, -2), (-7, -2)), rows[::2], rows[1::2]):
    print(f"{a:2} by {b:2}: quotient {q}, remainder {r}, b q + r = {b * q + r}; constants: {plain[0]} and {plain[1]}")
    as_seen &= q == a // b and plain == (a // b, a % b)
    as_seen &= (r != a % b) == (a * b < 0)
sys.exit(not as_seen)
PY
