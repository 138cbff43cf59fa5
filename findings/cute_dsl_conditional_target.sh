#!/usr/bin/env bash
# nvidia-cutlass-dsl 4.8.1: a conditional expression in the index of an assignment's target stops the DSL's preprocessor.
#
# `t[a if c else b] = x` in a kernel raises "TypeError: expected some sort of expr, but got <ast.FunctionDef ...>", with
# no line of the user's file. The preprocessor replaces such an expression by a function of its own, and puts that where
# an expression has to stand. It happens to plain Python lists, too, and where the condition is known at compile time.
# The same index is accepted when it is read, in `+=`, as an `and`, and if it has got a name before.
# The script compiles for sm_90a; it needs no GPU and launches nothing.
#
# Output seen on 2026-11-30:
#   store       TypeError: expected some sort of expr, but got <ast.FunctionDef
#   store_list  TypeError: expected some sort of expr, but got <ast.FunctionDef
#   load        compiles
#   added       compiles
#   logic       compiles
#   named       compiles
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/v"
"$work/v/bin/python" -m pip install --quiet --no-compile nvidia-cutlass-dsl==4.8.1 2>"$work/pip.log" \
    || { cat "$work/pip.log"; exit 2; }
cat > "$work/target.py" <<'PY'
import sys

import cutlass
import cutlass.cute as cute
import cutlass.cute.runtime as runtime
from cutlass import Float32


@cute.kernel
def store(out: cute.Tensor):
    which = 1
    t = cute.make_rmem_tensor(2, Float32)
    t[1 if which > 0 else 0] = Float32(2.0)
    out[0] = t[1]


@cute.kernel
def store_list(out: cute.Tensor):
    which = 1
    kept = [Float32(0.0), Float32(0.0)]
    kept[1 if which > 0 else 0] = Float32(2.0)
    out[0] = kept[1]


@cute.kernel
def load(out: cute.Tensor):
    which = 1
    t = cute.make_rmem_tensor(2, Float32)
    t[1] = Float32(2.0)
    out[0] = t[1 if which > 0 else 0]


@cute.kernel
def added(out: cute.Tensor):
    which = 1
    t = cute.make_rmem_tensor(2, Float32)
    t[1] = Float32(2.0)
    t[1 if which > 0 else 0] += Float32(1.0)
    out[0] = t[1]


@cute.kernel
def logic(out: cute.Tensor):
    which = 1
    t = cute.make_rmem_tensor(2, Float32)
    t[which and 1] = Float32(2.0)
    out[0] = t[1]


@cute.kernel
def named(out: cute.Tensor):
    which = 1
    t = cute.make_rmem_tensor(2, Float32)
    index = 1 if which > 0 else 0
    t[index] = Float32(2.0)
    out[0] = t[1]


@cute.jit
def host(out: cute.Tensor):
    globals()[sys.argv[1]](out).launch(grid=(1, 1, 1), block=(32, 1, 1))


try:
    cute.compile(host, runtime.make_fake_tensor(Float32, (1,), (1,)), options="--gpu-arch sm_90a")
    print("compiles")
except Exception as error:
    print(f"{type(error).__name__}: {error}")
PY
cd "$work"
export CUTE_DSL_ARCH=sm_90a
status=0
tried() {  # kernel, what the output must contain
    local said
    said=$(v/bin/python target.py "$1" 2>&1 | grep -oE "$2" | head -1) || true
    [ -n "$said" ] || status=1
    printf '%-11s %s\n' "$1" "$said"
}
refused='TypeError: expected some sort of expr, but got <ast.FunctionDef'
tried store "$refused"
tried store_list "$refused"
for name in load added logic named; do tried "$name" compiles; done
exit $status
