"""Rules by which rows of `bench.py units` become parameters of the cycle model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cycle_model import gpus
from cycle_model.parameters.parameter import MEASURED, Gpu, Parameter, Table

# What rules calculate with: rows of measurements, and sums and quotients of them with a range.
#
# An `Expression` is data: `row("latency", instruction="rcp") - row("latency",
# instruction="add.f32")` says which rows it needs, in words, and is evaluated for the rows of one
# file.


class Missing(LookupError):
    """The file has no such row, or one that says why there is no figure."""


class Figure(NamedTuple):
    """A value, and the lowest and the highest of its repetitions."""

    value: float
    low: float
    high: float


class Rows:
    """The rows of a file of `bench.py units`."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._by_name: dict[str, list[Mapping[str, Any]]] = {}
        for each in rows:
            if "benchmark" in each:
                self._by_name.setdefault(each["benchmark"], []).append(each)

    def has(self, benchmark: str) -> bool:
        """Whether anything of this name was measured."""
        return any("value" in each for each in self._by_name.get(benchmark, ()))

    def figure(self, benchmark: str, variant: Mapping[str, Any]) -> Figure:
        """Figure of the one row whose variant has all of these; None: it does not have that key.
        Raises Missing where there is none, ValueError where there are several."""
        found = [
            each
            for each in self._by_name.get(benchmark, ())
            if all(each["variant"].get(key) == value for key, value in variant.items())
        ]
        words = words_of(benchmark, variant)
        if not found:
            raise Missing(f"no row of {words}")
        if len(found) > 1:
            raise ValueError(f"{len(found)} rows of {words}: a rule has to name one")
        if "value" not in found[0]:
            raise Missing(f"{words}: {found[0].get('error', 'no figure')}")
        return Figure(*(float(found[0][key]) for key in Figure._fields))


def words_of(benchmark: str, variant: Mapping[str, Any]) -> str:
    """`latency (instruction rcp)`."""
    named = ", ".join(f"{key} {value}" for key, value in variant.items() if value is not None)
    return f"{benchmark} ({named})" if named else benchmark


@dataclass(frozen=True)
class Expression:
    """An expression over rows.

    of: evaluates it, raises Missing.
    words: its description.
    plain: whether it is one term, which needs no brackets."""

    of: Callable[[Rows], Figure]
    words: str
    plain: bool = True

    def __add__(self, other: Expression | float) -> Expression:
        return _made(
            "+", self, other, lambda a, b: Figure(*(x + y for x, y in zip(a, b, strict=True)))
        )

    def __sub__(self, other: Expression | float) -> Expression:
        return _made("-", self, other, lambda a, b: Figure(
            a.value - b.value, a.low - b.high, a.high - b.low
        ))  # fmt: skip

    def __mul__(self, other: Expression | float) -> Expression:
        """Product of what is not negative."""
        return _made(
            "*", self, other, lambda a, b: Figure(*(x * y for x, y in zip(a, b, strict=True)))
        )

    def __truediv__(self, other: Expression | float) -> Expression:
        """Quotient of what is not negative."""
        return _made("/", self, other, lambda a, b: Figure(
            a.value / b.value, a.low / b.high, a.high / b.low
        ))  # fmt: skip


def _made(
    sign: str,
    left: Expression,
    right: Expression | float,
    compute: Callable[[Figure, Figure], Figure],
) -> Expression:
    other = right if isinstance(right, Expression) else constant(right)

    def of(rows: Rows) -> Figure:
        return compute(left.of(rows), other.of(rows))

    sides = [each.words if each.plain else f"({each.words})" for each in (left, other)]
    return Expression(of, f" {sign} ".join(sides), plain=False)


def row(benchmark: str, **variant: Any) -> Expression:
    """The figure of one row. `from_` stands for a key `from`."""
    named = {key.rstrip("_"): value for key, value in variant.items()}
    return Expression(lambda rows: rows.figure(benchmark, named), words_of(benchmark, named))


def constant(value: float) -> Expression:
    """A number that is no measurement."""
    return Expression(lambda _: Figure(value, value, value), f"{value:g}")


def mean(first: Expression, second: Expression) -> Expression:
    """Mean of two."""
    made = (first + second) / 2.0
    return Expression(made.of, f"the mean of {first.words} and {second.words}")


def not_negative(inner: Expression) -> Expression:
    """0 where it would be less."""

    def of(rows: Rows) -> Figure:
        return Figure(*(max(each, 0.0) for each in inner.of(rows)))

    return Expression(of, inner.words, inner.plain)


def slope(benchmark: str, key: str, first: float, last: float, **variant: Any) -> Expression:
    """Return the cost of each step of a key between two of its values."""
    here, there = (row(benchmark, **variant, **{key: at}) for at in (first, last))
    made = (there - here) / float(last - first)
    words = f"{benchmark} per {key} from {first} to {last}"
    named = {name.rstrip("_"): value for name, value in variant.items()}
    return Expression(made.of, words_of(words, named))


NEAR = 0.05  # of a step: a figure so near to a rounded one is that one


@dataclass(frozen=True)
class Rule:
    """Rule for a parameter.

    value: the parameter, rounded to `step`; its range includes the repetitions.
    also: alternative values.
    below, above: how far it may lie beyond the rows, in the parameter's unit.
    why: the reason for that.
    needs: benchmarks that the file must have.
    not_for: architecture of the GPUs whose number is not changed.
    """

    value: Expression
    also: tuple[Expression, ...] = ()
    below: float = 0.0
    above: float = 0.0
    step: float = 1.0
    why: str = ""
    needs: tuple[str, ...] = ()
    not_for: str = ""

    def figure(self, rows: Rows) -> Figure:
        """The parameter, rounded, with its range rounded outwards. Raises Missing."""
        for name in self.needs:
            if not rows.has(name):
                raise Missing(f"no row of {name}")
        found = self.value.of(rows)
        others = [each.of(rows).value for each in self.also]
        value = _rounded(round(found.value / self.step), self.step)
        low = min(value, found.low, *others, found.value - self.below)
        high = max(value, found.high, *others, found.value + self.above)
        low = _rounded(math.floor(low / self.step + NEAR), self.step)
        high = _rounded(math.ceil(high / self.step - NEAR), self.step)
        return Figure(value, min(low, value), max(high, value))

    @property
    def words(self) -> str:
        """Describe the source of the parameter."""
        more = "".join(f"; also {each.words}" for each in self.also)
        return self.value.words + more + (f"; {self.why}" if self.why else "")


def _rounded(steps: int, step: float) -> float:
    """Return `steps` times `step` without float noise; whole numbers as int."""
    value = round(steps * step, 6)
    return int(value) if value == int(value) else value


WARPS = 4  # of a scheduler, so that it always has one that can issue
FMAS = 8  # between the jumps of launch_body


def issue(instruction: str, schedulers: int = 1) -> Expression:
    return row("issue", instruction=instruction, warps=WARPS, schedulers=schedulers)


def latency(instruction: str) -> Expression:
    return row("latency", instruction=instruction)


def fence(name: str, behind: str = "nothing") -> Expression:
    return row("latency_membar", fence=name, behind=behind)


CLOCK = row("clock", load="fma of all SMs")  # GHz
PER_US = CLOCK * 1000.0  # cycles
WOKEN = row("mbarrier_wake", wait="try_wait", asleep_for=500)  # with the arrival
ARRIVES = 0.28  # of that: the arrival's share
SPLIT = "only the sum with the other one is measured, and split in the same way each time"
PING_PONG = row("mbarrier_ping_pong", wait="try_wait", schedulers=2)
REMOTE = row("mbarrier_ping_pong_remote", wait="try_wait", arrive="as by default", lanes=None)
ARRIVAL = row("mbarrier_arrive_issue", form="arrive", completes=False, lanes=1)
READY = row("mbarrier_ready", form="try_wait", chain="branch")
BEFORE = row("branch", branch="bra.uni", taken=True)
BESIDE = row("branch", branch="bra.uni", taken=False)


def relaxed(ctas: int) -> Expression:
    return row("cluster_barrier", ctas=ctas, arrive="relaxed", warps=4)


def barrier(warps: int) -> Expression:
    return row("named_barrier", warps=warps)


ISSUE = {
    "issue_fma": (Rule(issue("fma.f32")),),
    "issue_fma2": (Rule(issue("fma.f32x2")),),
    "issue_imad": (Rule(issue("mad.lo.s32")),),
    "issue_alu": (Rule(issue("lop3"), also=tuple(map(issue, ("min.f32", "prmt", "shf")))),),
    "issue_pack": (Rule(issue("cvt.bf16x2.f32")),),
    "issue_special": (Rule(issue("ex2")),),
    "issue_convert": (Rule(issue("cvt.s32.f32"), also=(issue("popc"), issue("clz"))),),
    "issue_tensor": (
        Rule(issue("mma.m16n8k16"), above=2, why="kernels with operands from shared memory"),
    ),
    "issue_access": (Rule(issue("ld.shared.b32", 4), also=(issue("st.shared.b32", 4),)),),
    "issue_shuffle": (Rule(issue("shfl", 4)),),
    "issue_reduce": (Rule(issue("redux", 4)),),
    "smem_bytes_per_cycle": (
        Rule(constant(512) / issue("ld.shared.v4.b32", 4), below=16, why="beside other accesses"),
    ),
}
LATENCY = {
    "latency_fma": (Rule(latency("fma.f32"), also=(latency("add.s32"),)),),
    "latency_alu": (Rule(latency("lop3"), also=(latency("add.s32"),)),),
    "latency_special": (Rule(latency("ex2"), also=(latency("rcp") - latency("add.f32"),)),),
    "latency_tensor": (Rule(latency("mma.m16n8k16"), not_for="sm_90a"),),
    "latency_shuffle": (Rule(latency("shfl"), also=(latency("redux") - latency("lop3"),)),),
    "latency_constant": (Rule(latency("ld.const"), above=32, why="LDC that is first of its line"),),
    "latency_vote": (
        Rule(latency("vote.ballot") - latency("lop3"), also=(latency("vote.ballot"),), below=2,
             why="the comparison in front is 4 to 6"),
    ),
    "latency_special_register": (
        Rule(latency("mov from clock"),
             also=(latency("mov from clock") - latency("setp selp"),
                   latency("mov from special") - latency("setp selp"))),
    ),
    "latency_membar": (
        Rule(fence("fence.acq_rel.cta"),
             also=(fence("membar.cta"), fence("fence.acq_rel.cta", "a store to global memory"))),
    ),
    "latency_membar_gpu": (
        Rule(fence("fence.acq_rel.gpu"),
             also=(fence("fence.acq_rel.gpu", "a store to global memory"),)),
    ),
    "latency_atomic_shared": (
        Rule(row("latency_atomic_shared", form="atom.shared.add.u32"),
             also=(latency("atom.shared chain"),)),
    ),
    "latency_atomic_global": (
        Rule(row("latency_atomic_global", form="atom.global.add.u32", lanes=1),
             also=(row("latency_atomic_global", form="atom.global.cas.b32", lanes=32),), below=16,
             why="L2 is nearer to some SMs"),
    ),
    "latency_tensor_allocation": (
        Rule(row("tensor_allocation", form="alloc and dealloc") / 2.0, below=20, above=60, step=5,
             why="the two may differ"),
    ),
    "shared_latency": (
        Rule(latency("ld.shared.b32 chain") - 1.0, also=(latency("ld.shared.v2 chain"),),
             why="the engine adds the cycle of issue"),
    ),
}  # fmt: skip
CONTROL = {
    "branch": (Rule(BEFORE - BESIDE, below=2, above=2, why="beside stores"),),
    "branch_cold": (
        Rule(not_negative((row("launch_body", body="16 jumps over 56", block=32)
              - row("launch_body", body="4 jumps over 56", block=32)) * PER_US / 12.0
             - (BEFORE - BESIDE) - float(FMAS)), step=4, above=33,
             why="jumps over 248 cost more: a page of code"),
    ),
    "parameter_sector": (
        Rule((row("launch_parameters", words=48, apart=64)
              - row("launch_parameters", words=32, apart=64)) * PER_US / 16.0 - latency("lop3"),
             below=5, above=8, why="4 to 8 words cost more each"),
    ),
    "mbarrier_arrive": (Rule(WOKEN * ARRIVES, below=6, above=6, why=SPLIT),),
    "mbarrier_wake": (Rule(WOKEN * (1 - ARRIVES), below=6, above=6, why=SPLIT),),
    "mbarrier_ready": (Rule(READY - 9.0, also=(READY,), below=7, why="9 are those of its use"),),
    "mbarrier_arrive_remote": (
        Rule(REMOTE - PING_PONG, below=6, above=54, why="with release at cluster scope it is more"),
    ),
    "named_barrier": (Rule(barrier(1) * 2.0 - barrier(2), below=2, above=2, why="turns differ"),),
    "named_barrier_warp": (Rule((barrier(32) - barrier(1)) / 31.0),),
    "cluster_barrier": (Rule(relaxed(2), also=(relaxed(8),), below=4, why="turns differ"),),
}  # fmt: skip
CLUSTER = {
    "dsmem_latency": (
        Rule(row("dsmem_async", form="st.async.b32") - WOKEN - ARRIVAL, below=10, above=20, step=10,
             why="less wake-up and issue, which are split by guess"),
    ),
    "dsmem_rate": (
        Rule(row("dsmem_rate", form="st.v4.b32", warps=4, both_ways=False),
             also=(row("dsmem_rate", form="st.async.v4.b32", warps=1),
                   row("dsmem_rate", form="st.async.v4.b32", warps=4))),
    ),
    "dsmem_load": (
        Rule(mean(row("dsmem_latency", form="generic, 64-bit pointers"),
                  row("dsmem_latency", form="ld.shared::cluster.u32")),
             also=(row("dsmem_latency", form="generic, 64-bit pointers"),
                   row("dsmem_latency", form="ld.shared::cluster.u32"))),
    ),
}  # fmt: skip
OF_SM = {**ISSUE, **LATENCY, **CONTROL, **CLUSTER}


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


def _moved_bytes(what: str, from_: str | None) -> Expression:
    return row("memory_rate", what=what, from_=from_)


def _written(from_: str | None) -> Rule:
    """Return the time of a copy beyond a read of as many bytes; alternatively that of writes
    alone."""
    beside = _moved_bytes("copy", from_) - _moved_bytes("read", from_)
    per_us = constant(MOVED / 1000.0)
    return Rule(per_us / beside / CLOCK, also=(per_us / _moved_bytes("write", from_) / CLOCK,),
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
        Rule(constant(MOVED / 1000.0) / _moved_bytes("write", "L2") / CLOCK, step=50, above=450,
             why="TMA stores get more"),
    ),
    "hbm_bytes_per_cycle": (
        Rule(_streamed("hbm_bytes_per_cycle", "ld.global.v4"), step=10, below=130,
             also=(_streamed("hbm_bytes_per_cycle", "cp.async"),), why="with less in flight"),
    ),
    "hbm_bytes_written_per_cycle": (_written("HBM"), _written(None)),
}  # fmt: skip
OF_MEMORY = {**TMA, **MEMORY}


OWN = 250.0  # cycles of the kernel of `touch` beside its load, as modelled: its code is short
SPINS = 4000.0  # cycles of work of launch_dependent
ROOT = 131**0.5 - 1  # the first CTAs of 131 SMs, of which one is there already
TIMED = "up to 0.2 more in graphs by which kernels are timed"


def _exit(ctas: int) -> Expression:
    return row("launch_exit", ctas=ctas, block=128)


def _touch(what: str, ctas: int) -> Expression:
    return row("touch", what=what, ctas=ctas, block=128, memory="warm")


def _dependent(work: str) -> Expression:
    return row("launch_dependent", work=work, cycles=int(SPINS), smem=0)


def _started(block: int, cluster: int) -> Expression:
    return row("cta_start", block=block, cluster=cluster)


def _clock(tensor: str) -> Rule:
    """Clock of arithmetic; what the tensor cores leave of it is in the range."""
    return Rule(CLOCK, also=(row("clock", load=tensor),), step=0.01, why="with tensor cores busy")


_OTHERS = _touch("nothing", 132) - _touch("nothing", 1)  # microseconds until all SMs have begun
OF_LAUNCHES = {
    "clock": (_clock("wgmma of zeros, all SMs"), _clock("tcgen05 of zeros, all SMs")),
    "cta_start": (Rule(mean(_started(128, 1), _started(384, 1)), step=10,
                       also=(_started(128, 1), _started(384, 1))),),
    "cluster_start": (Rule(_started(128, 2), also=(_started(384, 2),), step=10),),
    "launch": (
        Rule(_touch("load", 1) - (_L2 + OWN) / PER_US, step=0.01, below=0.03, above=0.2,
             why=TIMED),
    ),
    "launch_least": (Rule(_exit(1), above=0.2, step=0.01, why=TIMED),),
    "dependent_least": (
        Rule(row("launch", how="overlapped", ctas=1), needs=("launch_dependent",), step=0.01,
             also=(row("launch", how="overlapped", ctas=132),)),
    ),
    "dependent_start": (
        Rule(_dependent("before") - constant(SPINS) / PER_US - _OTHERS, step=0.05,
             below=0.05, above=0.2, why="less what the last CTA begins later"),
    ),
    "dependent_release": (
        Rule(_dependent("behind") - constant(SPINS) / PER_US, step=0.05),
    ),
    "sm_interval": (
        Rule(_OTHERS * PER_US / ROOT, step=2, above=10,
             also=((_exit(132) - _exit(1)) * PER_US / ROOT,), why="kernels that load take longer"),
    ),
    "cta_interval": (
        Rule((_exit(1056) - _exit(132)) * PER_US / 924.0, step=0.05, below=0.05, above=0.2,
             why="by threads of a CTA"),
    ),
    "cta_interval_later": (
        Rule((_exit(4224) - _exit(2112)) * PER_US / 2112.0, step=0.1, below=0.2, above=0.15,
             why="by threads of a CTA"),
    ),
}  # fmt: skip


OF_A_ROUND = {"fma.f32": 1024, "add.f32": 1024, "cvt.bf16x2.f32": 512, "ex2": 128}
STEP_BYTES = 32  # of a row of an operand along K, in one instruction
SMEM, TMEM = "shared memory", "tensor memory"


# -- Hopper ---------------------------------------------------------------------------------------


def _behind_its_turn(a: str) -> Expression:
    """Cycles of m64n128k16: one alone until its wait, less what it takes of the tensor core."""
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
    """Cycles of 128 rows in each CTA, beyond what the MMA takes of the tensor core."""
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
OF_TENSOR = {**WGMMA, **TCGEN05}


RULES: dict[str, tuple[Rule, ...]] = {
    **OF_SM,
    **OF_MEMORY,
    **OF_TENSOR,
    **OF_LAUNCHES,
}
"""Rules by name. If there are several, the first one whose rows are all there counts."""

UNRULED = {
    "issue_uniform": "nothing but the compiler issues uniform instructions",
    "latency_plain": "of instructions that stand in no list",
    "latency_uniform": "nothing but the compiler issues uniform instructions",
    "special_queue": "read off kernels, see notes/cycle_model.md",
    "operands_read": "until a scoreboard of operands is free: no instruction tells it apart",
    "tma_gather": "no benchmark names rows one by one",
    "mma_issue": "only its sum with the latency of a commit is measured, which is in that one",
    "sms_that_share": "read off how the rate of L2 grows with readers that are apart: 132 / 8",
    "hbm_tail": "chosen by the model beside `touch`, behind other work",
}


def gpu_of(name: str) -> Gpu:
    """The GPU of the model that a device's name has as a word, such as "NVIDIA H200". ValueError
    where there is none."""
    found = next((word for word in name.split() if word in gpus.GPUS), name)
    return gpus.named(found)


def table_of(rows: Sequence[dict[str, Any]], file: str, name: str = "") -> Table:
    """Return the parameters of a GPU from rows of `bench.py units`. Raise ValueError for a GPU
    without parameters, and for rows of another GPU.

    file: name of the rows' file, for the source of each.
    name: name of the device; by default that of the rows."""
    setting = rows[0] if rows and "benchmark" not in rows[0] else {}
    measured = setting.get("device", {}).get("name", "")
    name = name or measured
    if not name:
        raise ValueError(f"{file} does not say which GPU it is of; --gpu does")
    gpu, words = gpu_of(name), measured.split()
    if (other := next((word for word in words if word in gpus.GPUS), gpu.name)) != gpu.name:
        raise ValueError(f"{file} is of {measured!r}, an {other}, not of {name!r}")
    known, parameters, kept = Rows(rows), {}, {}
    for each, base in gpu.parameters.items():
        if each in UNRULED:
            kept[each] = UNRULED[each]
            continue
        try:
            parameters[each] = _measured(RULES[each], known, gpu, base.unit, file)
        except Missing as error:
            kept[each] = str(error)
    return Table(name, setting.get("date", ""), file, parameters, kept)


def _measured(rules: Sequence[Rule], rows: Rows, gpu: Gpu, unit: str, file: str) -> Parameter:
    missing = Missing(f"kernels on {gpu.name} were judged with the number that is there")
    for rule in rules:
        if rule.not_for == gpu.arch:
            continue
        try:
            return Parameter(*rule.figure(rows), unit, MEASURED, f"{file}: {rule.words}")
        except Missing as error:
            missing = error
    raise missing
