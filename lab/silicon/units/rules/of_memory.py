"""Rules: TMA, L2 and memory."""

from __future__ import annotations

from lab.silicon.units.rules.arithmetic import (
    Expression,
    constant,
    mean,
    not_negative,
    row,
    slope,
)
from lab.silicon.units.rules.of_sm import CLOCK, WOKEN
from lab.silicon.units.rules.rule import Rule

ROWS = 8  # of the smallest box
BOX = {"width": 128, "swizzle": "128B"}
PER_ROW = slope("tma_latency_l2", "rows", ROWS, 256, **BOX)
STORED_ROW = slope("tma_store_read", "rows", ROWS, 256, width=128)
LEAST_ROW = row("tma_row", rows=128, stages=4, **BOX)
KEPT = 600  # cycles after which a TMA store is surely visible
MOVED = 536_346_624  # bytes of memory_rate


def _from_hbm(width: int) -> Expression:
    return row("tma_latency_hbm", width=width, rows=ROWS, swizzle="none")


def _spread(ctas: int, rows: int) -> Expression:
    return row("tma_multicast_latency", ctas=ctas, rows=rows)


def _streamed(name: str, form: str, sms: int | str = "all") -> Expression:
    return row(name, form=form, kib_in_flight=128, sms=sms, readers=None)


def _shared(form: str, **how: object) -> Expression:
    return row("l2_bytes_per_cycle", form=form, sms="all", readers=132, **how)


def _moved(what: str, from_: str | None) -> Expression:
    return row("memory_rate", what=what, from_=from_)


def _written(from_: str | None) -> Rule:
    """What a copy takes longer than a read of as much; and writes alone."""
    beside = _moved("copy", from_) - _moved("read", from_)
    per_us = constant(MOVED / 1000.0)
    return Rule(per_us / beside / CLOCK, also=(per_us / _moved("write", from_) / CLOCK,),
                step=20, below=80, why="a copy less a read; a write alone")  # fmt: skip


_L2 = row("global_latency_l2", footprint=1 << 20)
_MEMORY = row("global_latency_hbm", footprint=1 << 26)
TMA = {
    "tma_issue": (
        Rule(row("tma_row", rows=ROWS, stages=8, **BOX) * float(ROWS), step=2, not_for="sm_90a",
             below=20, why="boxes of 8 rows, of which the rows are hidden"),
    ),
    "tma_row": (
        Rule(LEAST_ROW, also=(row("tma_row", width=64, rows=256, stages=8),), step=0.01),
    ),
    "tma_write": (
        Rule(not_negative(PER_ROW - LEAST_ROW), above=0.1, step=0.1,
             why="a row of a box that is waited for costs no more than one of many"),
    ),
    "tma_latency_l2": (
        Rule(row("tma_latency_l2", rows=ROWS, **BOX) - PER_ROW * float(ROWS) - WOKEN, step=10,
             below=20, above=20, why="less rows and wake-up"),
    ),
    "tma_latency_hbm": (
        Rule(mean(_from_hbm(64), _from_hbm(128)) - PER_ROW * float(ROWS) - WOKEN, step=10,
             also=(_from_hbm(32) - PER_ROW * float(ROWS) - WOKEN,), why="less rows and wake-up"),
    ),
    "tma_remote": (
        Rule(not_negative(_spread(2, 64) - _spread(1, 64)), step=5,
             also=(_spread(2, 8) - _spread(1, 8), _spread(4, 128) - _spread(1, 128))),
    ),
    "tma_store_row": (
        Rule(row("tma_store_row", width=128, rows=256), step=0.2,
             also=(row("tma_store_row", width=64, rows=64),
                   row("tma_store_row", width=128, rows=8))),
    ),
    "tma_store_read": (
        Rule(row("tma_store_read", width=128, rows=ROWS) - STORED_ROW * float(ROWS), below=12,
             above=8, why="less rows"),
    ),
    "tma_store_latency": (
        Rule(row("tma_store_latency", width=128, rows=ROWS) - STORED_ROW * float(ROWS), below=13,
             also=(constant(KEPT),), why="less rows; when others see it nobody has measured"),
    ),
}  # fmt: skip
MEMORY = {
    "global_latency_l1": (Rule(row("global_latency_l1"), above=2, why="as shared memory"),),
    "global_latency_l2": (
        Rule(_L2, below=10, above=10, step=10, why="some SMs are nearer to a slice than others"),
    ),
    "global_latency_hbm": (
        Rule(row("global_latency_hbm", footprint=1 << 30), step=5, below=60, above=60,
             needs=("touch",), why="beside `hbm_tail`, which `touch` shows; pages and banks"),
    ),
    "copy_latency": (
        Rule(row("copy_latency", from_="L2") - _L2, below=12, step=1,
             also=(row("copy_latency", from_="HBM") - _MEMORY,), why="a group and its wait"),
    ),
    "l2_bytes_per_cycle": (
        Rule(_streamed("l2_bytes_per_cycle", "cp.async", 1), below=22, above=6,
             why="loads get less; a line each cycle is the most"),
    ),
    "l2_bytes_in_all": (
        Rule(_streamed("l2_bytes_per_cycle", "ld.global.v4"), step=50, below=250,
             also=(_streamed("l2_bytes_per_cycle", "cp.async"),), why="with less in flight"),
    ),
    "l2_bytes_delivered": (
        Rule(_shared("tma", who="apart"), step=100,
             also=(_shared("cp.async"), _shared("ld.global.v4"))),
    ),
    "l2_bytes_written_in_all": (
        Rule(constant(MOVED / 1000.0) / _moved("write", "L2") / CLOCK, step=50, above=450,
             why="TMA stores get more"),
    ),
    "hbm_bytes_per_cycle": (
        Rule(_streamed("hbm_bytes_per_cycle", "ld.global.v4"), step=10, below=130,
             also=(_streamed("hbm_bytes_per_cycle", "cp.async"),), why="with less in flight"),
    ),
    "hbm_bytes_written_per_cycle": (_written("HBM"), _written(None)),
}  # fmt: skip
RULES = {**TMA, **MEMORY}
