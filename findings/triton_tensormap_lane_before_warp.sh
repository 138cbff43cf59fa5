#!/usr/bin/env bash
# triton 3.8.0: a descriptor made in a kernel is copied by the warp before its lanes are told of the fields of one lane.
#
# `tl.make_tensor_descriptor` fills 128 bytes of shared memory: all lanes of a warp store zeros, one lane sets the fields
# by `tensormap.replace`, and the whole warp copies them to global memory by `tensormap.cp_fenceproxy ... .sync.aligned`.
# In the PTX of 3.8.0 nothing stands between the last `tensormap.replace` and the copy. `.sync` makes lanes wait for
# each other, but the manual promises no order of memory for it, as it does for `bar.warp.sync`; so no rule makes the 31
# other lanes see the fields that they copy. 3.9.0 has a `bar.warp.sync` there. Nothing tells of it: the kernel compiles
# without a message, for sm_90 and for sm_100, and only a checker of memory order sees the difference. Who keeps kernels
# of 3.8.0 as PTX (an ahead-of-time build, a cache of Inductor) keeps it. The script needs no GPU.
#
# Output seen on 2026-11-30:
#   triton 3.8.0 sm_90: 2 descriptors; before the copy: none none
#   triton 3.8.0 sm_100: 2 descriptors; before the copy: none none
#   triton 3.9.0 sm_90: 2 descriptors; before the copy: bar.warp.sync bar.warp.sync
#   triton 3.9.0 sm_100: 2 descriptors; before the copy: bar.warp.sync bar.warp.sync
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
cat > "$work/look.py" <<'PY'
import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def copy(x, y, rows, columns, SIZE: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [SIZE, SIZE])
    target = tl.make_tensor_descriptor(y, [rows, columns], [columns, 1], [SIZE, SIZE])
    target.store([0, 0], source.load([0, 0]))


for capability in (90, 100):
    types = {"x": "*fp16", "y": "*fp16", "rows": "i32", "columns": "i32", "SIZE": "constexpr"}
    source = ASTSource(fn=copy, signature=types, constexprs={(4,): 64})
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    names = r"tensormap\.replace|tensormap\.cp_fenceproxy|bar\.warp\.sync"
    found, between = re.findall(names, ptx), []
    for before, here in zip(found, found[1:]):
        if here == "tensormap.cp_fenceproxy":
            between.append("none" if before == "tensormap.replace" else before)
    print(f"triton {triton.__version__} sm_{capability}: {len(between)} descriptors; "
          f"before the copy: {' '.join(between)}")
PY
for version in 3.8.0 3.9.0; do
    python3 -m venv "$work/$version"
    "$work/$version/bin/python" -m pip install --quiet --no-compile --no-deps "triton==$version" 2>"$work/pip.log" \
        || { cat "$work/pip.log"; exit 2; }
    TRITON_CACHE_DIR="$work/cache$version" "$work/$version/bin/python" "$work/look.py"
done | tee "$work/seen"
cmp "$work/seen" <(sed -n 's/^#   \(triton 3\.\)/\1/p' "$0")
