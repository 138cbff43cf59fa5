"""lab/sass/signals.py: as compiled by ptxas, none of our kernels signals while it reads or writes
tensor memory; without a tcgen05.wait one does.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cycle_model.sass.flow import Function
from cycle_model.sass.tools import HOW_TO_GET_TOOLS, disassemble, parse, tools_found
from fmha.config import AttentionConfig
from gqa_lowlatency.config import DecodeConfig
from kernelkit.compile.compiler import compile_once
from lab.sass.signals import early_signals, signals
from mla.indexer.scores_config import BlockScaledConfig
from moe.config import GroupedConfig
from moe.mixed.config import MixedConfig
from moe.sm100 import kernel as grouped_kernel
from moe.sm100.roles import epilogue

ARCH = "sm_100a"
GROUPED = "moe.sm100.kernel"
ATTENTION, DECODE = "fmha.sm100.kernel", "gqa_lowlatency.sm100.kernel"
MIXED, SCORES = "moe.mixed.sm100.kernel", "mla.indexer.sm100.signature"
WIDEST = GroupedConfig(tile_rows=256, tile_n=256)

KERNELS = {
    "grouped 256 x 256": (GROUPED, WIDEST),
    "attention 64 base": (ATTENTION, AttentionConfig(head_dim=64, schedule="base")),
    "decode": (DECODE, DecodeConfig()),
    "attention 128": (ATTENTION, AttentionConfig(head_dim=128, schedule="pingpong")),
    "scores": (SCORES, BlockScaledConfig("indexer_fp4", 32, 4, "fp32", box=32)),
    "mixed": (MIXED, MixedConfig()),
    "grouped 128 x 128 quantised": (
        GROUPED,
        GroupedConfig(limit=True, amax=True, out="nvfp4", granularity=8),
    ),
    "grouped 8 x 128": (GROUPED, GroupedConfig(tile_rows=8)),
    "attention 128 e4m3": (
        ATTENTION,
        AttentionConfig(head_dim=128, dtype="e4m3", schedule="pingpong"),
    ),
    "attention 192 128": (ATTENTION, AttentionConfig(head_dim=192, v_head_dim=128)),
    "attention 256": (ATTENTION, AttentionConfig(head_dim=256, schedule="base")),
    "attention 512": (ATTENTION, AttentionConfig(head_dim=512, schedule="base")),
    "decode 64 columns": (DECODE, DecodeConfig(group=64, q_tokens=1)),
}
# Signals that may come before, since they concern something else: (kernel, access) -> reason.
OF_SOMETHING_ELSE = {
    ("mixed", "STTM"): "the stage of weights is free once they are in registers; A is signalled"
    " behind the wait",
}


def function_of(name: str, folder: Path) -> Function:
    source, config = KERNELS[name]
    path = folder / "kernel.cubin"
    path.write_bytes(compile_once(config, ARCH, source).cubin)
    (function,) = parse(disassemble(path))
    return function


needs_ptxas = pytest.mark.usefixtures("whole_ptxas")
needs_tools = pytest.mark.skipif(not tools_found(), reason=HOW_TO_GET_TOOLS)


@needs_tools
@needs_ptxas
@pytest.mark.parametrize("name", KERNELS)
def test_every_signal_waits_for_tensor_memory(name: str, tmp_path: Path):
    function = function_of(name, tmp_path)
    assert any(item.opcode.startswith("LDTM") for item in function.instructions)
    assert signals(function)
    early = {(name, each.access.word): str(each) for each in early_signals(function)}
    assert early.keys() == {key for key in OF_SOMETHING_ELSE if key[0] == name}, early


@needs_tools
@needs_ptxas
def test_without_the_wait_a_signal_comes_first(changed, tmp_path: Path):
    changed(epilogue, [grouped_kernel], "Epilogue", ("        tmem.wait_loads()\n", ""))
    found = early_signals(function_of("grouped 256 x 256", tmp_path))
    assert any("SYNCS.ARRIVE" in str(each) and "LDTM" in str(each) for each in found)


# -- listings that are written here ---------------------------------------------------------------


def control(*, writes: int = 7, waits: int = 0) -> int:
    """The upper half of an instruction's encoding."""
    return 1 << 41 | writes << 46 | 7 << 49 | waits << 52


def function(*lines: tuple[str, int] | str) -> Function:
    """A kernel of instructions, each with its upper half (by default one without waits); a line
    that ends in a colon is a label."""
    text, address = ['\t.section\t.text.kernel,"ax",@progbits', ".text.kernel:"], 0
    for line in lines:
        words, high = (line, control()) if isinstance(line, str) else line
        if words.endswith(":"):
            text.append(words)
            continue
        text.append(f"        /*{address:04x}*/                   {words} ;  /* 0x{0:016x} */")
        text.append(f"                                            /* 0x{high:016x} */")
        address += 16
    (found,) = parse("\n".join(text))
    return found


LOAD = ("LDTM.x4 R4, tmem[UR4]", control(writes=1))
USE = ("FADD R4, R4, R5", control(waits=0b10))
ARRIVE = "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R0+URZ], RZ"
STORE, FENCE = "STTM.x4 tmem[UR4], R4", ("FENCE.VIEW.ASYNC.T", control(writes=0))
WAITING = (ARRIVE, control(waits=0b1))


@pytest.mark.parametrize(
    ("lines", "early"),
    [
        ((LOAD, USE, ARRIVE, "EXIT"), 0),
        ((LOAD, ARRIVE, USE, "EXIT"), 1),
        ((LOAD, "DEPBAR.LE SB1, 0x0", ARRIVE, "EXIT"), 0),
        ((LOAD, "DEPBAR.LE SB1, 0x1", ARRIVE, "EXIT"), 1),
        ((LOAD, WAITING, "EXIT"), 1),  # waits for another scoreboard
        ((LOAD, LOAD, "BAR.ARV 0x1, 0x80", USE, "EXIT"), 2),
        ((LOAD, "UTCBAR [UR4], URZ", USE, "EXIT"), 1),
        ((LOAD, "STG.E.STRONG.GPU desc[UR4][R2.64], R9", USE, "EXIT"), 1),
        ((LOAD, "STG.E desc[UR4][R2.64], R9", USE, "EXIT"), 0),
        ((LOAD, "@P0 BRA `(.L_x_0)", USE, ".L_x_0:", ARRIVE, "EXIT"), 1),  # on one path
        ((LOAD, USE, "BRA `(.L_x_0)", ARRIVE, ".L_x_0:", "EXIT"), 0),
        ((".L_x_0:", ARRIVE, LOAD, "@P0 BRA `(.L_x_0)", "EXIT"), 1),  # in the next iteration
        ((STORE, FENCE, WAITING, "EXIT"), 0),
        ((STORE, FENCE, ARRIVE, "EXIT"), 1),
        ((STORE, ARRIVE, "EXIT"), 1),
    ],
)
def test_signals_before_accesses_are_complete(lines: tuple, early: int):
    assert len(early_signals(function(*lines))) == early


def test_both_are_named():
    (found,) = early_signals(function(LOAD, ARRIVE, "EXIT"))
    assert str(found) == "SYNCS.ARRIVE.TRANS64.A1T0 at 0x10 does not wait for LDTM.x4 at 0x0"
