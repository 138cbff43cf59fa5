"""Which pipe executes an opcode, for how long it is busy, when the result is there: as names of
parameters, so that one table serves all GPUs."""

from __future__ import annotations

from typing import NamedTuple

from cycle_model.engine import layout as L
from cycle_model.sass.instruction import Instruction


class Cost(NamedTuple):
    """issue, latency: names of parameters, "" for none. pipe: of `engine.layout`."""

    pipe: int
    issue: str
    latency: str


def _costs(pipe: int, issue: str, latency: str, words: str) -> dict[str, Cost]:
    return dict.fromkeys(words.split(), Cost(pipe, issue, latency))


PLAIN = Cost(L.NO_PIPE, "", "latency_plain")
ALU = Cost(L.ALU, "issue_alu", "latency_alu")
UNIFORM = Cost(L.UNIFORM, "issue_uniform", "latency_uniform")
COSTS = {
    **_costs(L.FMA, "issue_fma", "latency_fma", "FFMA FADD FMUL HFMA2 HADD2 HMUL2"),
    **_costs(L.FMA, "issue_fma2", "latency_fma", "FFMA2 FADD2 FMUL2"),
    **_costs(L.FMA, "issue_imad", "latency_fma", "IMAD"),
    **_costs(L.SPECIAL, "issue_special", "latency_special", "MUFU"),
    **_costs(L.SPECIAL, "issue_convert", "latency_special", "F2F I2F F2I FRND POPC FLO BREV"),
    **_costs(L.ALU, "issue_pack", "latency_alu", "F2FP"),
    **_costs(L.ALU, "issue_alu", "latency_vote", "VOTE VOTEU R2UR ELECT MATCH"),
    **_costs(L.TENSOR, "issue_tensor", "latency_tensor", "HMMA QMMA OMMA IMMA DMMA"),
    **_costs(L.MEMORY, "issue_access", "latency_plain", "LDS STS LDSM STSM STL LDGSTS LDG LD"),
    **_costs(L.MEMORY, "issue_access", "global_latency_l1", "LDL"),
    **_costs(L.MEMORY, "issue_access", "latency_plain", "STG ST STAS REDAS"),
    **_costs(L.MEMORY, "issue_access", "latency_atomic_shared", "ATOMS"),
    **_costs(L.MEMORY, "issue_access", "latency_atomic_global", "ATOM ATOMG RED REDG"),
    **_costs(L.MEMORY, "issue_shuffle", "latency_shuffle", "SHFL"),
    **_costs(L.MEMORY, "issue_reduce", "latency_shuffle", "REDUX CREDUX"),
    **_costs(L.NO_PIPE, "", "latency_constant", "LDC LDCU ULDC"),
    **_costs(L.NO_PIPE, "", "latency_special_register", "S2R S2UR CS2R"),
    **_costs(L.NO_PIPE, "", "latency_tensor_allocation", "UTCATOMSWS"),
    **_costs(L.NO_PIPE, "", "latency_membar", "MEMBAR"),
    **_costs(L.NO_PIPE, "", "", "BRA BRX JMP JMX CALL RET"),
    **dict.fromkeys(
        "NOP BSSY BSYNC WARPSYNC DEPBAR LDGDEPBAR ERRBAR CGAERRBAR CCTL FENCE EXIT ACQBULK PREEXIT"
        " UTMACCTL UTMALDG UTMASTG UTMAREDG UBLKCP UBLKRED UTCBAR UTCCP UTCHMMA UTCQMMA UTCOMMA"
        " SYNCS BAR UTMACMDFLUSH UCGABAR_ARV UCGABAR_WAIT NANOSLEEP UVIRTCOUNT USETMAXREG"
        " HGMMA QGMMA IGMMA BGMMA WARPGROUP WARPGROUPSET ARRIVES UGETNEXTWORKID LDTM STTM".split(),
        PLAIN,
    ),
}


def cost_of(item: Instruction) -> Cost:
    """Of uniform instructions that stand in no list, the uniform pipe; of others the ALU's."""
    if item.opcode.startswith(("IMAD.MOV", "IMAD.U32", "IMAD.SHL")):
        return Cost(L.FMA, "issue_fma", "latency_fma")
    if item.word == "MEMBAR" and not item.opcode.endswith(".CTA"):
        return Cost(L.NO_PIPE, "", "latency_membar_gpu")
    found = COSTS.get(item.word)
    if found is not None:
        return found
    return UNIFORM if item.word.startswith("U") else ALU
