"""What soak.py knows by name."""

from __future__ import annotations

from functools import partial

from lab.flags import kvcache, soak
from lab.tools.command import Command

SOAK = {
    "kvcache": Command(
        "lab.soak.random_caches",
        kvcache.add_soak,
        """The long run of kvcache's manager: random operations beside the naive model of its tests.

Every operation is followed by check(), a replay of the events and a comparison of all bytes that
the requests it touched still need; every --every of them by one of everything. Pools and policy
are those of the tests for one seed in four, and random for the others. A failure stops the run; its
operations are made as few as still fail, and stored. Exit code 0: nothing failed; 1: something did.
""",
        "--operations 50k --layout sparse --seed 7",
    ),
    "fmha": Command(
        "lab.soak.attention",
        partial(soak.add_campaign, soak.OF_ATTENTION),
        """Random attention problems on the GPU at hand, each twice, against fp64 on the same GPU.

Kernels are drawn from the whole space of options and tunable fields; what the plan refuses is left
out and counted. Processes compile them, and as soon as one is there, its problems run: lengths at
random (odd, zero, at the edges of tiles), NaN behind every length, around every tensor and in every
page that nobody uses, scores that are huge, zero, or climb. The bits have to be equal from run to
run, and errors within the tolerance of kernelkit/numerics/tolerance.py. All is drawn by --seed: a
problem keeps its number whatever the other flags are, but --small, --long and the architecture.
What fails prints the command that repeats it, and goes to out/soak_fmha_failures.json. In the
emulator a few small ones run, the second time under an adversarial schedule. Exit code 0: nothing
failed; 1: something did; 2: refused.
""",
        "--configs 60 --problems 3000 --minutes 8 --json out/soak_fmha.json",
    ),
    "gqa": Command(
        "lab.soak.decode",
        partial(soak.add_campaign, soak.OF_DECODE),
        """Random decode steps on the GPU at hand, each twice, against fp64 on the same GPU.

Kinds of steps are drawn from the whole space of options, clusters and tunable fields; what the plan
refuses is left out and counted. Processes compile their kernels, and as soon as those are there,
the problems run: batches and lengths at random (zero, a few, beside the edges of tiles), NaN behind
every length, around every tensor and in every page that nobody uses, scores that are zero, large,
climb, or lie far below 0. The bits have to be equal from run to run, and errors within the
tolerance of kernelkit/numerics/tolerance.py. All is drawn by --seed: a problem keeps its number
whatever the other flags are, but --small, --long and the architecture. What fails prints the
command that repeats it, and goes to out/soak_gqa_failures.json. In the emulator a few small ones
run, the second time under an adversarial schedule. Exit code 0: nothing failed; 1: something did;
2: refused.
""",
        "--configs 60 --problems 3000 --minutes 8 --json out/soak_gqa.json",
    ),
    "moe": Command(
        "lab.soak.moe",
        partial(soak.add_campaign, soak.OF_EXPERTS),
        """Random products and layers of experts in four bits, on the Hopper GPU at hand.

Each problem runs twice, against fp64 on the same GPU. Two of three kernels are those of
`mixed_gemm`: any tile, format, activation, bias, rows that are gathered; the others are whole
layers by `fused_moe`: routers, shared experts, experts of a rank, tokens that all choose one
expert or none that is here. Processes compile them, and as soon as one is there, its problems run:
experts without rows, rows at the edges of tiles, NaN around every tensor, in rows that nobody has
and in tokens that no slot names. The bits have to be equal from run to run, and errors within the
tolerance of kernelkit/numerics/tolerance.py. All is drawn by --seed: a problem keeps its number
whatever the other flags are, but --small and --large. What fails prints the command that repeats
it, and goes to out/soak_moe_failures.json. In the emulator a few small ones run, the second time
under an adversarial schedule. Exit code 0: nothing failed; 1: something did; 2: refused.
""",
        "--configs 60 --problems 3000 --minutes 8 --json out/soak_moe.json",
    ),
    "rows": Command(
        "lab.soak.rows.perform",
        soak.add_rows,
        """A row's result does not depend on other rows: random calls of every family, each twice.

The second time one row, such as a token, has other contents: NaN, infinities, numbers near 1e30,
subnormal ones, zeros, or other experts. The bits of all other rows have to be the same. Kinds of
calls come from all subjects in turns; each has many problems, which share its kernels. All is drawn
by --seed: a problem keeps its number whatever the other flags are, but --small and the
architecture. What fails prints the command that repeats it, and goes to
out/soak_rows_failures.json. Exit code 0: nothing failed; 1: something did; 2: refused.
""",
        "--configs 100 --problems 50000 --minutes 8 --json out/soak_rows.json",
    ),
}
