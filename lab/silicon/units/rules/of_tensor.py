"""Rules: tensor cores, of Hopper (wgmma) and of Blackwell (tcgen05), and tensor memory."""

from __future__ import annotations

from lab.silicon.units.rules.arithmetic import Expression, constant, mean, not_negative, row
from lab.silicon.units.rules.of_sm import WOKEN
from lab.silicon.units.rules.rule import Rule

OF_A_ROUND = {"fma.f32": 1024, "add.f32": 1024, "cvt.bf16x2.f32": 512, "ex2": 128}
STEP_BYTES = 32  # of a row of an operand along K, in one instruction
SMEM, TMEM = "shared memory", "tensor memory"


# -- Hopper ---------------------------------------------------------------------------------------


def _behind_its_turn(a: str) -> Expression:
    """Of m64n128k16: one alone until its wait, less what it takes of the tensor core."""
    alone = row("wgmma_until_wait", shape="m64n128k16", a=a, per_commit=1)
    return alone - row("wgmma", shape="m64n128k16", a=a, warpgroups=1)


def _lost(instruction: str, count: int = 0) -> Expression:
    """Cycles that an instruction takes longer beside wgmma."""
    busy, alone = (row("wgmma_beside", instruction=instruction, wgmma=on) for on in (True, False))
    return not_negative(busy - alone) / float(count or OF_A_ROUND[instruction])


WGMMA = {
    "wgmma_latency_smem": (
        Rule(_behind_its_turn(SMEM), below=2, above=2, why="the wait is in it"),
    ),
    "wgmma_latency_registers": (
        Rule(_behind_its_turn("registers"), below=2, above=2, why="the wait is in it"),
    ),
    "beside_wgmma": (
        Rule(mean(_lost("add.f32"), _lost("cvt.bf16x2.f32")), also=(_lost("fma.f32"),), step=0.1,
             below=0.1),
    ),
    "special_beside_wgmma": (
        Rule(_lost("ex2"), also=(_lost("softmax", 128), _lost("softmax, rounded", 128)), step=0.1,
             below=0.1),
    ),
}  # fmt: skip


# -- Blackwell ------------------------------------------------------------------------------------


def rate(n: int, *, m: int = 128, ctas: int = 1, a: str = SMEM, kind: str = "f16") -> Expression:
    """Cycles between MMAs of a kind."""
    return row("tcgen05_mma", kind=kind, ctas=ctas, m=m, n=n, a=a)


def until_wait(n: int, m: int, ctas: int, a: str) -> Expression:
    """Cycles of one MMA alone, from its issue to the end of the wait for its commit."""
    return row("tcgen05_until_wait", ctas=ctas, m=m, n=n, a=a, per_commit=1)


def _commit(ctas: int, a: str) -> tuple[Rule, ...]:
    """Of 128 rows in each CTA, beyond what the MMA takes of the tensor core."""
    m = 128 * ctas
    value = until_wait(128, m, ctas, a) - rate(128, m=m, ctas=ctas, a=a)
    other = until_wait(256, m, ctas, a) - rate(256, m=m, ctas=ctas, a=a)
    return (Rule(value, also=(other,), below=4, above=4, why="the wait is in it"),)


def _moved(name: str, repeat: int) -> Expression:
    """Cycles of a warp between accesses of 32x32b.x`repeat`, of one warp on each scheduler."""
    return row(name, shape="32x32b", repeat=repeat, warps=4)


def _waited(name: str, repeat: int) -> Expression:
    return row(name, shape="32x32b", repeat=repeat)


TCGEN05 = {
    "mma_overhead": (
        Rule(not_negative(rate(256) - 128.0), step=0.01, above=0.1,
             also=(not_negative(rate(128, a=TMEM) - 64.0),), why="beyond N / 2 cycles"),
    ),
    "mma_smem_rate": (
        Rule(constant(STEP_BYTES * (128 + 64)) / rate(64), below=8,
             why="of MMAs whose operands take longer than they do"),
    ),
    "mma_switch": (
        Rule(not_negative(row("tcgen05_switch", n=128) - mean(rate(128), rate(128, a=TMEM))),
             also=(not_negative(row("tcgen05_switch", n=64)
                                - mean(rate(64), rate(64, a=TMEM))),), above=4,
             why="by N"),
    ),
    "commit_latency_smem_1": _commit(1, SMEM),
    "commit_latency_tmem_1": _commit(1, TMEM),
    "commit_latency_smem_2": _commit(2, SMEM),
    "commit_latency_tmem_2": _commit(2, TMEM),
    "fill_rate": (
        Rule(row("tcgen05_cp", shape="128x256b"), also=(row("tcgen05_cp", shape="128x128b"),
                                                        row("tcgen05_cp", shape="32x128b.warpx4"))),
    ),
    "tmem_load_rate": (
        Rule(constant(32) / _moved("tmem_load", 32), step=0.05,
             also=(constant(64) / _moved("tmem_load", 64), constant(16) / _moved("tmem_load", 16))),
    ),
    "tmem_store_rate": (
        Rule(constant(32) / _moved("tmem_store", 32), step=0.05,
             also=(constant(64) / _moved("tmem_store", 64),
                   constant(16) / _moved("tmem_store", 16))),
    ),
    "tmem_load_latency": (
        Rule(not_negative(_waited("tmem_load_wait", 32) - _moved("tmem_load", 32)),
             also=(not_negative(_waited("tmem_load_wait", 8) - _moved("tmem_load", 8)),),
             why="until its wait, less the transfer"),
    ),
    "tmem_store_latency": (
        Rule(not_negative(_waited("tmem_store_wait", 32) - _moved("tmem_store", 32)),
             also=(not_negative(_waited("tmem_store_wait", 8) - _moved("tmem_store", 8)),),
             why="until its wait, less the transfer"),
    ),
    "cancel_latency": (
        Rule(row("cancel", form="try_cancel") - WOKEN, below=50, above=100, step=10,
             why="of a grid that has nothing left"),
    ),
}  # fmt: skip
RULES = {**WGMMA, **TCGEN05}
