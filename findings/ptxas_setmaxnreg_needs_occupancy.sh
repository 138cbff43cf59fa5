#!/usr/bin/env bash
# nvidia-cuda-nvcc 13.0.88 (ptxas): a fixed number of threads is not enough for setmaxnreg; a minimum of one CTA is.
#
# ptxas drops `setmaxnreg` where it cannot tell how many registers a thread has at entry. `.reqntid 128` names every
# launch's threads, and the register count of the kernel is ptxas's own, yet the instruction is dropped. It stays if
# `.minnctapersm 1` stands beside `.reqntid` or `.maxntid`, which asks for nothing that a launch does not have anyway, or
# with `.maxnreg`. `.minnctapersm` alone does not do. What is dropped is told as "info" (C7508), and the exit code is 0,
# so a build that prints warnings and errors only, or compiles in memory, does not show it: the roles of a
# warp-specialised kernel then share registers evenly and may spill. 12.9.86 and 13.5.37 do the same, for sm_90a and
# sm_100a. The script needs no GPU.
#
# Output seen on 2026-11-30:
#   none                   exit 0, dropped
#   reqntid                exit 0, dropped
#   maxntid                exit 0, dropped
#   minnctapersm           exit 0, dropped
#   reqntid minnctapersm   exit 0, kept
#   maxntid minnctapersm   exit 0, kept
#   maxnreg                exit 0, kept
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/v"
"$work/v/bin/python" -m pip install --quiet --no-compile --no-deps nvidia-cuda-nvcc==13.0.88 2>"$work/pip.log" \
    || { cat "$work/pip.log"; exit 2; }
ptxas=$(find "$work/v" -name ptxas -type f)
declare -A words=([reqntid]=".reqntid 128, 1, 1" [maxntid]=".maxntid 128, 1, 1" [minnctapersm]=".minnctapersm 1"
    [maxnreg]=".maxnreg 128")

judge() {  # the directives of a kernel
    local name="${*:-none}" code=0 directives="" each
    for each in "$@"; do directives+="${words[$each]}"$'\n'; done
    cat > "$work/k.ptx" <<PTX
.version 8.8
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out)
$directives
{
    .reg .b64 %rd<2>;
    .reg .b32 %r<2>;
    setmaxnreg.dec.sync.aligned.u32 24;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    st.global.u32 [%rd1], %r1;
    ret;
}
PTX
    "$ptxas" -arch=sm_90a "$work/k.ptx" -o "$work/k.cubin" 2>"$work/told" || code=$?
    grep -q "'setmaxnreg' ignored" "$work/told" && local what=dropped || local what=kept
    printf '%-22s exit %s, %s\n' "$name" "$code" "$what"
}

{
    judge
    judge reqntid
    judge maxntid
    judge minnctapersm
    judge reqntid minnctapersm
    judge maxntid minnctapersm
    judge maxnreg
} | tee "$work/seen"
sed -n '/^# Output seen/,/^set /s/^#   //p' "$0" | diff - "$work/seen"
