"""NVIDIA's tools that read cubins: where they are, and what they say of a file."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("cuobjdump", "nvdisasm")
HOW_TO_GET_TOOLS = "not found: cuobjdump, nvdisasm; `pip install '.[sass]'` brings both"
RESOURCES = re.compile(r"\bREG:(\d+)\s+STACK:(\d+)")


@dataclass(frozen=True)
class Resources:
    """What a launch needs per thread: registers, and bytes of stack."""

    registers: int
    stack: int


def find_tool(name: str) -> str | None:
    """A CUDA binary tool: this environment's wheel before the PATH, which may be older."""
    wheels = Path(sysconfig.get_path("purelib")) / "nvidia"
    installed = sorted(wheels.glob(f"*/bin/{name}"))
    return str(installed[-1]) if installed else shutil.which(name)


def tools_found() -> bool:
    """True when cubins can be read here."""
    return all(find_tool(name) for name in TOOLS)


def disassemble(cubin: Path) -> str:
    """Its code with the words that encode it; raises FileNotFoundError without the tool."""
    return _output("nvdisasm", "--print-code", "--print-instruction-encoding", cubin)


def resources(cubin: Path) -> list[Resources]:
    """Resources of every kernel in the file."""
    usage = _output("cuobjdump", "--dump-resource-usage", cubin)
    return [Resources(*map(int, match)) for match in RESOURCES.findall(usage)]


def ptxas_version(cubin: Path) -> str:
    """Of the ptxas that wrote the file: '12.9.83', or '12.9' where it leaves no note."""
    elf = _output("cuobjdump", "--dump-elf", cubin)
    if note := re.search(r"Tool Version:.* V([\d.]+)", elf):
        return note[1]
    toolkit = re.search(r"\btoolkit=(\d\d)\.?(\d)", elf)
    return f"{toolkit[1]}.{toolkit[2]}" if toolkit else "unknown"


def _output(tool: str, *arguments: object) -> str:
    command = find_tool(tool)
    if command is None:
        raise FileNotFoundError(HOW_TO_GET_TOOLS)
    return subprocess.run(
        [command, *map(str, arguments)], capture_output=True, text=True, check=True
    ).stdout
