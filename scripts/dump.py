"""What the compiler made of an attention config: PTX, and registers, spills and SASS where it can.

Registers and SASS need NVIDIA's cuobjdump and nvdisasm, which `pip install '.[sass]'` brings.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

from _common import add_config_arguments, config_of, describe
from fmha import AttentionConfig
from fmha.sm100.compile import compile_attention

TOOLS = ("cuobjdump", "nvdisasm")
HOW_TO_GET_TOOLS = "not found: cuobjdump, nvdisasm; `pip install '.[sass]'` brings both"
PTX_INSTRUCTION = re.compile(r"^\s+(?:@!?%\w+\s+)?([a-z][\w.:]*)[^;]*;")
SASS_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
RESOURCES = re.compile(r"\bREG:(\d+)\s+STACK:(\d+)\s+SHARED:(\d+)")

Kinds = dict[str, tuple[str, ...]]

# kind -> what its opcodes begin with; the first that matches counts
PTX_KINDS: Kinds = {
    "tensor core": ("tcgen05.mma", "tcgen05.cp"),
    "tensor memory": ("tcgen05.",),
    "TMA and bulk copies": ("cp.async.bulk", "cp.reduce"),
    "barriers and fences": ("mbarrier", "bar.", "barrier", "fence", "membar"),
    "memory": ("ld.", "st.", "atom", "red."),
    "special functions": ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh", "sin", "cos"),
    "conversions": ("cvt",),
    "floating point": ("fma", "add.f", "add.rn", "sub.f", "mul.f", "mul.rn", "max.", "min."),
    "control and selection": ("bra", "setp", "selp", "ret", "elect", "vote", "shfl"),
    "integer and moves": ("",),
}
SASS_KINDS: Kinds = {
    "tensor core": ("UTCHMMA", "UTCQMMA", "UTCOMMA", "UTCIMMA", "UTCMMA", "UTCCP"),
    "tensor memory": ("LDTM", "STTM", "UTCATOMSWS", "UTCBAR", "UTC"),
    "TMA and bulk copies": ("UTMA", "UBLKCP", "UBLKRED"),
    "barriers and fences": ("SYNCS", "BAR", "FENCE", "MEMBAR", "WARPSYNC", "UCGABAR", "DEPBAR"),
    "spills": ("STL", "LDL", "MOV.SPILL", "R2UR.FILL"),
    "memory": ("LDG", "STG", "LDS", "STS", "LDC", "ULDC", "ATOM", "RED"),
    "special functions": ("MUFU",),
    "conversions": ("F2F", "I2F", "F2I"),
    "floating point": ("FFMA", "FADD", "FMUL", "FMNMX", "FSEL", "FSET", "HFMA", "HADD", "HMUL"),
    "control and selection": ("BRA", "EXIT", "BSSY", "BSYNC", "ISETP", "SEL", "PLOP", "VOTE"),
    "integer and moves": ("",),
}


def count_kinds(text: str, instruction: re.Pattern, kinds: Kinds) -> Counter:
    """Instructions of a listing by kind, in the order of `kinds`."""
    opcodes = Counter(match[1] for match in map(instruction.match, text.splitlines()) if match)
    counts = Counter(dict.fromkeys(kinds, 0))
    for opcode, count in opcodes.items():
        kind = next(kind for kind, heads in kinds.items() if opcode.startswith(heads))
        counts[kind] += count
    return counts


def compile_to(folder: Path, config: AttentionConfig, arch: str) -> tuple[Path, Path]:
    """Compile and write (PTX, cubin), named after the config."""
    artifacts = compile_attention(config, arch).artifacts
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^\w.]+", "_", f"fmha_{arch}_{describe(config)}")
    ptx, cubin = folder / f"{stem}.ptx", folder / f"{stem}.cubin"
    ptx.write_text(artifacts.PTX, encoding="utf-8")
    cubin.write_bytes(artifacts.CUBIN)
    return ptx, cubin


def find_tool(name: str) -> str | None:
    """A CUDA binary tool: this environment's wheel before the PATH, which may be older."""
    wheels = Path(sysconfig.get_path("purelib")) / "nvidia"
    installed = sorted(wheels.glob(f"*/bin/{name}"))
    return str(installed[-1]) if installed else shutil.which(name)


def print_counts(title: str, counts: Counter) -> None:
    print(f"\n{title}: {sum(counts.values())} instructions")
    for kind, count in counts.items():
        if count:
            print(f"  {kind:<22}{count:>6}")


def print_sass(cubin: Path) -> None:
    """Registers, stack and SASS by kind; the listing lands beside the cubin."""
    cuobjdump, nvdisasm = (find_tool(name) for name in TOOLS)
    if not (cuobjdump and nvdisasm):
        print(f"\n{HOW_TO_GET_TOOLS}")
        return
    usage = _output(cuobjdump, "--dump-resource-usage", cubin)
    for registers, stack, shared in RESOURCES.findall(usage):
        print(f"\n{registers} registers, {stack} bytes of stack, {shared} bytes of static SMEM")
    listing = cubin.with_suffix(".sass")
    listing.write_text(_output(nvdisasm, "--print-code", cubin), encoding="utf-8")
    print_counts(
        f"SASS ({listing})", count_kinds(listing.read_text(), SASS_INSTRUCTION, SASS_KINDS)
    )


def _output(*command: object) -> str:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=True
    ).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="sm_100a", help="default: sm_100a")
    parser.add_argument("--out", type=Path, default=Path("out/dump"), help="default: out/dump")
    add_config_arguments(parser)
    options = parser.parse_args()
    config = config_of(options)
    try:
        config.check()
    except (ValueError, NotImplementedError) as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        return 1
    print(f"fmha forward for {options.arch}: {describe(config)}")
    ptx, cubin = compile_to(options.out, config, options.arch)
    print_counts(f"PTX ({ptx})", count_kinds(ptx.read_text(), PTX_INSTRUCTION, PTX_KINDS))
    print_sass(cubin)
    return 0


if __name__ == "__main__":
    sys.exit(main())
