"""ptxas makes other machine code of a kernel whose name has `cutlass` in it.

Compiles kernels under names with and without the word, and prints what ptxas gave each: registers,
bytes of spills, instructions. The PTX is the same but for the name. Needs cuobjdump and nvdisasm
(the extra `sass`), no GPU.

    PYTHONPATH=. python notes/kernel_names.py
"""

import tempfile
from pathlib import Path

from cycle_model.sass.tools import read, resources
from fmha.config import AttentionConfig
from gqa_lowlatency.config import DecodeConfig
from kernelkit.compile.kernel import CompiledKernel
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.trace import Traced
from moe.mixed.config import MixedConfig
from q8_0.product.choose import Sizes, choose

PRODUCT = choose("soa", "bf16", Sizes(2048, 8192, 2048), "sm_90a", aligned=True, vector=True)
KEYS = (
    KernelKey("q8_0.product.kernel", PRODUCT, "sm_90a"),
    KernelKey("fmha.sm90.kernel", AttentionConfig(head_dim=128, right=True), "sm_90a"),
    KernelKey("fmha.sm100.kernel", AttentionConfig(head_dim=128, right=True), "sm_100a"),
    KernelKey("gqa_lowlatency.portable.kernel", DecodeConfig(group=8, lens=True), "sm_90a"),
    KernelKey("moe.mixed.sm90.kernel", MixedConfig(swiglu=True), "sm_90a"),
)
NAMES = ("a_kernel", "a_cutlass_kernel", "a_CUTLASS_kernel", "a_cutlas_kernel")


def used(key: KernelKey, name: str) -> str:
    """Registers and bytes of spills of a thread, and instructions, under this name."""
    given = key.host_function()
    name_kernel = type(given[0]).kernel.set_name_prefix
    name_kernel(name, remove_cutlass_symbol=True, keep_mangled_name=False)
    try:
        made = CompiledKernel(Traced(given, key.arch, lambda _: None).artifact)
    finally:
        name_kernel("")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(made.cubin)
        (found,) = resources(path)
        _, function = read(path)
    count = len(function.instructions)
    return f"{found.registers} registers, {found.stack} bytes, {count} instructions"


if __name__ == "__main__":
    for key in KEYS:
        print(key.title())
        for name in NAMES if key is KEYS[0] else NAMES[:2]:
            print(f"  {name:18} {used(key, name)}", flush=True)
