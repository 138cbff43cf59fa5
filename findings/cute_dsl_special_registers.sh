#!/usr/bin/env bash
# nvidia-cutlass-dsl 4.8.1: text of `cute.arch.inline_ptx` cannot name a special register (%clock, %laneid, %smid, ...).
#
# The function turns `%` into `$`, as operands of LLVM's inline assembly are written. So `%clock` reaches LLVM as the
# operand `$clock`, which does not exist, and `%%clock` reaches ptxas as a symbol `$clock`. No other spelling was found
# that gives one percent sign. Registers that the text declares itself have to be named without it, too. Registers that
# have a function in `cute.arch` (clock, smid, lane_idx) can be read by that function, others not by such a text.
# The script compiles for sm_90a; it needs no GPU and launches nothing.
#
# Output seen on 2026-11-30:
#   {$w0}, %clock   refused: Bad $ operand number in inline asm string: 'mov.u32 $0, $clock;'
#   {$w0}, %%clock  refused: Unknown symbol '$clock'
#   {$w0}, %laneid  refused: Bad $ operand number in inline asm string: 'mov.u32 $0, $laneid;'
#   {$w0}, 7        compiles
#   cute.arch.clock compiles
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/v"
"$work/v/bin/python" -m pip install --quiet --no-compile nvidia-cutlass-dsl==4.8.1 2>"$work/pip.log" \
    || { cat "$work/pip.log"; exit 2; }
cat > "$work/register.py" <<'PY'
import sys

import cutlass
import cutlass.cute as cute
import cutlass.cute.runtime as runtime
from cutlass import Int32

OPERANDS = sys.argv[1]


@cute.kernel
def kernel(out: cute.Tensor):
    if cutlass.const_expr(OPERANDS == "cute.arch.clock"):
        out[0] = Int32(cute.arch.clock())
    else:
        out[0] = cute.arch.inline_ptx(f"mov.u32 {OPERANDS};", write_only_types=[Int32], read_only_args=[])


@cute.jit
def host(out: cute.Tensor):
    kernel(out).launch(grid=(1, 1, 1), block=(32, 1, 1))


try:
    cute.compile(host, runtime.make_fake_tensor(Int32, (1,), (1,)), options="--gpu-arch sm_90a")
    print("compiles")
except BaseException as error:
    print(error)
PY
cd "$work"
export CUTE_DSL_ARCH=sm_90a
status=0
tried() {  # operands, what the output must contain
    local said
    said=$(v/bin/python register.py "$1" 2>&1 | grep -oE "$2" | head -1) || true
    [ -n "$said" ] || status=1
    [ "$said" = compiles ] || said="refused: $said"
    printf '%-15s %s\n' "$1" "$said"
}
tried '{$w0}, %clock' "Bad . operand number in inline asm string: 'mov.u32 .0, .clock;'"
tried '{$w0}, %%clock' "Unknown symbol '.clock'"
tried '{$w0}, %laneid' "Bad . operand number in inline asm string: 'mov.u32 .0, .laneid;'"
tried '{$w0}, 7' 'compiles'
tried 'cute.arch.clock' 'compiles'
exit $status
