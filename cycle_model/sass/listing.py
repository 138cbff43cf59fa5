"""What nvdisasm and cuobjdump say of a cubin, as kernels with their control flow."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from cycle_model.sass.flow import Function
from cycle_model.sass.instruction import SPILLS, Control, Instruction, kinds_of
from cycle_model.sass.tools import disassemble, ptxas_version, resources
from cycle_model.sass.wgmma import is_serialised

SECTION = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+)")
LABEL = re.compile(r"^(\.L_\w+|\$?[\w$]+):$")
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
UPPER_HALF = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/\s*$")


def parse(listing: str) -> list[Function]:
    """Every kernel of a listing of nvdisasm, in its order. Where the listing has no encoding, all
    instructions have the control word that asks for nothing."""
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
    """(what can be said of every kernel, its code) of a file with one kernel.

    registers and stack of a thread; spills: instructions that move registers to local memory or
    back; instructions: all of them; serialised: see `is_serialised`; ptxas: its version. Raises
    FileNotFoundError without the tools, ValueError for more kernels than one.
    """
    (usage,), (function,) = resources(cubin), parse(disassemble(cubin))
    spills = kinds_of(function.instructions, {"spills": SPILLS, "": ("",)})["spills"]
    counts = {"spills": spills, "instructions": len(function.instructions)}
    said = {"serialised": is_serialised(function), "ptxas": ptxas_version(cubin)}
    return vars(usage) | counts | said, function
