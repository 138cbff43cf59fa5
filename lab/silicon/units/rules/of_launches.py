"""Rules: what a launch costs beside its instructions, and the clock."""

from __future__ import annotations

from lab.silicon.units.rules.arithmetic import Expression, constant, mean, row
from lab.silicon.units.rules.of_memory import _L2
from lab.silicon.units.rules.of_sm import CLOCK, PER_US
from lab.silicon.units.rules.rule import Rule

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
    """Of arithmetic; what the tensor cores leave of it is in the range."""
    return Rule(CLOCK, also=(row("clock", load=tensor),), step=0.01, why="with tensor cores busy")


_OTHERS = _touch("nothing", 132) - _touch("nothing", 1)  # microseconds until all SMs have begun
RULES = {
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
