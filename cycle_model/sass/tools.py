"""NVIDIA's tools that read cubins: their location, and the kernels that they list."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cycle_model.sass.flow import SPILLS, Control, Function, Instruction, is_serialised, kinds_of

TOOLS = ("cuobjdump", "nvdisasm")
HOW_TO_GET_TOOLS = (
    "not found: cuobjdump, nvdisasm; both are in the extra sass: "
    "pip install 'blackwell-kernels[sass]', or '.[sass]' in a checkout"
)
RESOURCES = re.compile(r"\bREG:(\d+)\s+STACK:(\d+)")


@dataclass(frozen=True)
class Resources:
    """Resources per thread: registers, and bytes of stack."""

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
    """Disassemble with the encoding words; raise FileNotFoundError without the tool."""
    return _output("nvdisasm", "--print-code", "--print-instruction-encoding", cubin)


def resources(cubin: Path) -> list[Resources]:
    """Resources of every kernel in the file."""
    usage = _output("cuobjdump", "--dump-resource-usage", cubin)
    return [Resources(*map(int, match)) for match in RESOURCES.findall(usage)]


def ptxas_version(cubin: Path) -> str:
    """Return the version of the ptxas that wrote the file: '12.9.83', or '12.9' without a note."""
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


SECTION = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+)")
LABEL = re.compile(r"^(\.L_\w+|\$?[\w$]+):$")
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
UPPER_HALF = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/\s*$")


def parse(listing: str) -> list[Function]:
    """Parse every kernel of a listing of nvdisasm, in its order.

    In a listing without encoding, all instructions have a control word without requests.
    """
    functions: list[Function] = []
    name, instructions, labels = "", [], {}
    for line in [*listing.splitlines(), "\t.section\t.text.end,"]:
        if match := INSTRUCTION.match(line):
            address, guard, opcode, operands = match.groups()
            operands = operands.strip()
            instructions.append(Instruction(int(address, 16), guard or "", opcode, operands))
        elif upper := UPPER_HALF.match(line):
            control = Control.decoded(int(upper[1], 16))
            instructions[-1] = replace(instructions[-1], control=control)
        elif label := LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif section := SECTION.match(line):
            if instructions:
                functions.append(Function(name, instructions, labels))
            name, instructions, labels = section[1], [], {}
    return functions


def read(cubin: Path) -> tuple[dict[str, Any], Function]:
    """Return (properties, code) of a file with one kernel.

    The properties are:
        registers and stack: per thread
        spills: number of instructions that move registers to local memory or back
        instructions: number of all instructions
        serialised: see `is_serialised`
        ptxas: its version

    Raises FileNotFoundError without the tools, ValueError for more than one kernel.
    """
    (usage,), (function,) = resources(cubin), parse(disassemble(cubin))
    spills = kinds_of(function.instructions, {"spills": SPILLS, "": ("",)})["spills"]
    counts = {"spills": spills, "instructions": len(function.instructions)}
    said = {"serialised": is_serialised(function), "ptxas": ptxas_version(cubin)}
    return vars(usage) | counts | said, function
