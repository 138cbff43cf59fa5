"""What run.py, explain.py, dump.py, emulate.py, cycles.py, bench.py and soak.py know by name."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from lab.flags import attention, bench, cycles, decode, dsv4, kvcache, moe, q8_0, soak, steps
from lab.silicon.units.flags import add_units
from lab.tools import groups
from lab.tools.command import Command
from ptxemu.host.command_line import add_check_arguments

Add = Callable[[argparse.ArgumentParser], None]

EXACT = """\
A GPU that the kernel is written for runs it; everywhere else the emulator runs its PTX. The
yardstick is the fp64 definition, and beside each error stands the one that the reference with the
kernel's own rounding points makes. Exit code 1: out of tolerance, or the checker found an error;
2: refused.
"""


def _checked(add: Add, parser: argparse.ArgumentParser) -> None:
    add(parser)
    add_check_arguments(parser)


def _of(subject: str, add: Add, parser: argparse.ArgumentParser) -> None:
    """Flags of a verb that knows no family, and the name of its module."""
    add(parser)
    parser.set_defaults(subject=subject)


def _run(subject: str, add: Add, about: str, example: str) -> Command:
    return Command("lab.verbs.run", partial(_checked, partial(_of, subject, add)), about, example)


def _explain(subject: str, add: Add, about: str, example: str = "") -> Command:
    return Command("lab.verbs.explain", partial(_of, subject, add), about, example)


RUN = {
    "fmha": _run(
        "fmha",
        attention.add_run,
        f"Runs the attention kernel and prints how exact it is.\n\n{EXACT}"
        "Without flags of a case the demonstration's four run.",
        "--head-dim 128 --causal --kv-len 512",
    ),
    "gqa": _run(
        "gqa",
        decode.add_run,
        f"Runs the decode kernel and prints how exact it is, and on a GPU how long it takes.\n\n"
        f"{EXACT}",
        "--kv-len 8k --kv-heads 8 --q-heads 64 --batch 1 --arch sm_90a",
    ),
    "moe": _run(
        "moe",
        moe.add_run,
        "Runs a MoE layer, from router logits to the combined output, and prints how exact it is."
        f"\n\n{EXACT}",
        "--tokens 9 --hidden 256 --intermediate 128 --experts 6 --top-k 2",
    ),
    "models": Command(
        "lab.verbs.models",
        partial(_checked, moe.add_errors),
        """Runs layers of experts of models in the emulator, and prints how exact each form is.

Routers, shared experts, biases and activations are the models' own, sizes are reduced. Errors are
beside the definition with the same weights, in percent of the norm. Exit code 1: more than torch
has that rounds where the kernels do, or the checker found an error; 2: refused.""",
        "--model gpt-oss-120b",
    ),
    "kvcache": Command(
        "lab.verbs.life",
        partial(_checked, kvcache.add_run),
        """Runs a KV cache through the life of some requests and says what happened at every step.

Requests share beginnings, append through the kernels, are attended to over the cache's own pages,
forked, taken back, sent to the host's memory and fetched, preempted, and refused. Behind every step
all entries of all requests are compared with kvcache/movement/reference.py, byte for byte, and
attention with the fp64 definition over dense keys. Exit code 1: a wrong byte, attention out of
tolerance, or the checker found an error; 2: something was refused.""",
        "--model deepseek-v4-flash --record bf16 --layers 1",
    ),
    "dsv4": Command(
        "lab.dsv4.perform",
        partial(_checked, dsv4.add_run),
        """Runs one layer of DeepSeek-V4 over the cache, beside a model that recomputes everything.

Prompts arrive in chunks while earlier requests decode; every step compresses, indexes, selects,
attends and runs the experts by the repository's kernels. A plain torch model keeps all tokens and
computes everything anew in every step; every component is held against it, within a limit that is
derived (lab/dsv4/judge.py says how). Weights are random, the width is reduced,
head_dim 512, the windows and the records are the model's. Exit code 1: something is out of its
limit, or the checker found an error; 2: the run is refused.""",
        "--kind csa --prefix 200 --steps 300",
    ),
    "q8_0": _run(
        "q8_0",
        q8_0.add_run,
        """Runs what reads weights in Q8_0, in both layouts, and prints how exact it is.

A GPU runs the kernels; without one the emulator runs their PTX. Products are compared with fp64,
what moves and rounds with the reference's bits, and one layout with the other, bit for bit. Exit
code 1: wrong, or the checker found an error; 2: refused.""",
        "--operations matvec product --shapes 48x256 --tokens 3 17 --bias",
    ),
    **{
        step: _run(
            "steps",
            partial(steps.add_run, step),
            f"{about}\n\nResults are compared with the reference. Exit code 1: wrong, or the "
            "checker found an error; 2: refused.",
            "--rows 9 --check",
        )
        for step, about in steps.ABOUT.items()
    },
}

# -- explain --------------------------------------------------------------------------------------

STATIC = "The flags are those of run.py. Nothing is compiled: the plan is data."
EXPLAIN = {
    "fmha": _explain(
        "fmha",
        attention.add_static,
        "The plan of an attention case: roles, edges, and the maps of shared and tensor memory.\n\n"
        f"{STATIC} The figures of fmha/README.md are copies of this output.",
        "--head-dim 128 --causal",
    ),
    "gqa": _explain(
        "gqa",
        decode.add_static,
        "The plan of a decode case: who works on which keys, and what a CTA holds where.\n\n"
        f"{STATIC} Without a GPU of --arch nothing says how many\nclusters it would run at once, "
        "which may make them narrower.",
        "--kv-len 8k --kv-heads 8 --q-heads 64",
    ),
    "moe": _explain(
        "moe",
        moe.add_product,
        "The plan of a layer's grouped GEMM: which tiles, who does what, and what lies where.\n\n"
        f"{STATIC} --product says which of the two it is.",
        "--model deepseek-v4-pro --tokens 64 --experts 8",
    ),
    "q8_0": _explain(
        "q8_0",
        q8_0.add_static,
        "The kernels that read weights in Q8_0: which one, who takes what, and what lies where.\n\n"
        f"{STATIC}",
        "--operations product --tokens 2k --arch sm_89",
    ),
    **{
        step: _explain(
            "steps",
            partial(steps.add_case, step),
            f"{about}\n\nWhich kernels it launches, their configs, and the plan of those that have "
            "one.\nNothing is compiled.",
        )
        for step, about in steps.ABOUT.items()
    },
}

# -- dump -----------------------------------------------------------------------------------------

SASS = """\
Registers and SASS need NVIDIA's cuobjdump and nvdisasm, which `pip install '.[sass]'` brings."""


def _dumped(add: Add, parser: argparse.ArgumentParser) -> None:
    add(parser)
    group = parser.add_argument_group("output")
    groups.add_out(group, "out/dump", "folder of PTX, cubin and SASS")
    groups.add_json(group)


def _dump(subject: str, add: Add, what: str, example: str = "") -> Command:
    about = f"What the compiler made of {what}: PTX, registers, spills and SASS by kind.\n\n{SASS}"
    return Command("lab.verbs.dump", partial(_dumped, partial(_of, subject, add)), about, example)


DUMP = {
    "fmha": _dump("fmha", attention.add_static, "an attention kernel", EXPLAIN["fmha"].example),
    "gqa": _dump("gqa", decode.add_dump, "a decode kernel", EXPLAIN["gqa"].example),
    "moe": _dump("moe", moe.add_dump, "a layer's grouped GEMM", EXPLAIN["moe"].example),
    "q8_0": _dump("q8_0", q8_0.add_static, "the kernels that read Q8_0", EXPLAIN["q8_0"].example),
    **{
        step: _dump("steps", partial(steps.add_case, step), f"the kernels of `{step}`")
        for step in steps.ABOUT
    },
}

# -- emulate --------------------------------------------------------------------------------------


def _emulated(name: str, parser: argparse.ArgumentParser) -> None:
    RUN[name].flags(parser)
    group = parser.add_argument_group("timeline")
    words = "which launch is drawn, from 0 on"
    groups.add(group, "launch", words, shown="the one with the most instructions")
    groups.add(group, "cta", "CTA of the picture", shown="the first with spans")
    groups.add_out(group, "out/timeline", "both files, less .json and .png")
    parser.set_defaults(name=name, backend="emulate")
    if name == "fmha":
        parser.set_defaults(**attention.PLAIN | {"kv_len": (512,)})


EMULATE = {
    name: Command(
        "lab.verbs.emulate",
        partial(_emulated, name),
        f"{command.title}\n\nIn the emulator, with the timeline of one launch: a Perfetto trace, a "
        "picture, and counts.\nOpen the JSON at ui.perfetto.dev. Times in it are nominal: they "
        "show order and overlap, no\nspeed. The flags are those of run.py.",
        command.example,
    )
    for name, command in RUN.items()
}

# -- cycles ---------------------------------------------------------------------------------------


def _modelled(subject: str, add: Add, parser: argparse.ArgumentParser) -> None:
    add(parser)
    cycles.add_cycles(parser, headlines=subject == "fmha")
    parser.set_defaults(subject=subject)
    if subject == "fmha":
        parser.set_defaults(**attention.PLAIN | {"kv_len": (512,)})


MODELLED = """\
The kernel runs in the emulator, which records what each warp does; each warp is found again in the
machine code, and that is replayed by the cycle, with the parameters of a GPU. Nothing here is
measured: docs/cycle_model.md says how far to trust it. The range is that of the parameters'."""


def _of_cycles(name: str, subject: str, add: Add, what: str, example: str = "") -> Command:
    about = f"What {what} would take on a GPU, and why.\n\n{MODELLED}"
    return Command("lab.cycles.perform", partial(_modelled, subject, add), about, example)


def _with_arch(add: Add, parser: argparse.ArgumentParser) -> None:
    add(parser)
    if "--arch" not in parser._option_string_actions:
        groups.add(parser, "arch", "what to compile for", choices=groups.ARCHS,
                   shown="the kernel's first")  # fmt: skip


CYCLES = {
    "fmha": _of_cycles(
        "fmha", "fmha", partial(_with_arch, attention.add_case), "attention", "--head-dim 128"
    ),
    "gqa": _of_cycles(
        "gqa",
        "gqa",
        partial(_with_arch, decode.add_case),
        "a decode",
        "--kv-len 8k --kv-heads 8 --q-heads 64 --batch 1 --arch sm_90a",
    ),
    "moe": _of_cycles("moe", "moe", partial(_with_arch, moe.add_layer), "a layer of experts"),
    "kvcache": _of_cycles(
        "kvcache", "steps", partial(steps.add_family, "kvcache"), "the cache's kernels"
    ),
    **{
        step: _of_cycles(step, "steps", partial(steps.add_case, step), f"`{step}`")
        for step in steps.ABOUT
        if step not in steps.NATIVE_ONLY
    },
    "layers": Command(
        "lab.cycles.layers",
        cycles.add_layers,
        "MoE layers of models at their true sizes, beside what is published of others.\n\n"
        "Every kernel of moe.fused_moe runs in the emulator, of large grids some clusters, and is "
        "modelled as\none launch of a stream; weights come from memory. Nothing here is measured: "
        "docs/cycle_model.md says\nhow far to trust it.",
        "--model gpt-oss-120b --tokens 1 64 4k",
    ),
    "beside": Command(
        "lab.cycles.beside",
        cycles.add_beside,
        "Kernels that were timed on a GPU beside what the cycle model says of them.\n\n"
        "Each row of the files is drawn, run and modelled again, with the parameters of the GPU of "
        "the file.\nPairs are rows of one step whose measured times differ by more than 10 %.",
        "results/model_h100/kvcache.json --only append gather --every 3",
    ),
    "mainloops": Command(
        "lab.cycles.mainloops",
        cycles.add_mainloops,
        "Published main loops of GEMMs in one CTA beside what the cycle model says of them.\n\n"
        "A kernel of the same structure is recorded with a short K for each row; each further step "
        "takes what the last\nrounds of its ring took. Of the parameters tma_row, tma_write, "
        "tma_latency_l2 and tma_issue come from\nrows of this table, the others from elsewhere.",
        "results/published_mainloops_b200.csv --every 10",
    ),
    "published": Command(
        "lab.cycles.published",
        cycles.add_published,
        "FlashAttention-4 beside times of it that others published.\n\n"
        "Its forward pass is compiled by the DSL of this environment, or the one of a checkout, "
        "runs in the\nemulator and is modelled. Of a persistent kernel three tiles of a CTA are "
        "executed.",
        "results/published_fa4_b200.csv --source ../flash-attention",
    ),
}


def cycles_of_file(name: str) -> Command:
    """Command that models FILE.py:function."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.set_defaults(file=name, arch=None)

    return _of_cycles(name, "of_file", add, f"what {name} launches")


# -- bench ----------------------------------------------------------------------------------------

COLD = """\
Times are medians of CUDA graph replays, per call. Cold: calls rotate over buffers of more than
twice the L2 cache. Warm: all calls read the same buffers. Whoever is compared takes turns."""
OF_ROWS = f"""\
{COLD}
Calls rotate over at most 128 sets of buffers; smaller problems are marked warm, and what they take
is a launch. A copy reads and writes as many bytes as the problem has. Results are compared with the
reference before anything is timed."""
PUBLISHED = {
    "kvcache": """

Host: over the bus, beside a memcpy per slot. Copies of slots move as many bytes as so many rows of
bf16. Published elsewhere: dequantise and gather of 584-byte entries in CuTe DSL on a GB200 (8
TB/s), 2.3 to 2.5 TB/s with 8192 rows, 4.1 to 4.4 with 32,000 (vLLM #42236, #55061).""",
    "dsv4": """

Published elsewhere: compressors in CuTe DSL, C4 10.0 us with one token, 9.8 with 128, 15.6 with
1024, 47.8 with 4096 (Triton: 22.1, 35.5 with 4096); C128 12.6 us with one token, 12.5 with 32,
28.2 with 128 (vLLM #43584, GPU not said). The best 512 keys of one row: 8.0 us of 4096, 9.0 of
16,384 (TensorRT-LLM #14602), about 15 of 262,144 (LMSYS on Lightning TopK).""",
}


def _bench(subject: str, add: Add, about: str, example: str) -> Command:
    return Command("lab.bench.perform", partial(_of, subject, add), about, example)


def _steps(family: str, what: str, example: str) -> Command:
    about = f"{what}, beside torch and a copy of as many bytes.\n\n{OF_ROWS}"
    about += PUBLISHED.get(family, "")
    return _bench("steps", partial(steps.add_bench, family), about, example)


def _moe_bench(parser: argparse.ArgumentParser) -> None:
    steps.add_bench("moe", parser)
    moe.add_models(parser)


BENCH = {
    "fmha": _bench(
        "fmha",
        bench.add_fmha,
        """Attention beside FlashAttention-4 and -2, cuDNN, FlashInfer, or static figures.

Times need a GPU. All peers of a problem take turns of a tenth of a second, in an order that is
drawn anew in each round, since a GPU at its power limit slows down while it computes. A time is
that of a call between CUDA events, behind a flush of L2 as triton's do_bench has it, without the
host; it is the median over turns of medians, its spread that of the turns. What a peer computes is
compared with fmha's first: one that is wrong, is not installed or does not take a problem says so
in its line. cudnn and fa2 are backends of torch's scaled_dot_product_attention. TFLOP/s count four
FLOP per visible pair and column, of a causal square half of all pairs. SM clock and power are read
in the midst of turns.

Rows: anchor has 16k tokens, heads x head dim = 2048, head dims 64, 128, 256, 1k to 16k keys, full
and causal; gpt-oss 64/8 heads of 64 with sinks, with a window of 128 and without; gqa 64/8 heads of
128; mla heads of 192, values of 128; hd512 64 query heads over one KV head of 512.

Static figures are what ptxas made of a config: registers, spills, the SASS of the softmax loop by
kind, and where in the loop statistics and P are published. They need `pip install '.[sass]'`.""",
        "--rows gpt-oss gqa --peers fmha fa4 --json out/fmha.json",
    ),
    "gqa": _bench(
        "gqa",
        bench.add_gqa,
        f"""Decode attention beside torch and FlashInfer: latency, or static figures without a GPU.

{COLD}
Every peer is timed in the same run on the same tensors, after its result has been compared with an
fp32 reference. The floor is the bytes of a launch at the bandwidth of a large read (torch.amax),
which is measured first.""",
        '--batch 1 8 64 --kv-len 1k 8k 64k --peers decode "torch cudnn"',
    ),
    "merge": _steps("merge", "The merge of attention results", "--rows 128 8k --names stack"),
    "moe": _bench(
        "moe",
        _moe_bench,
        f"""The steps around a MoE layer's products beside torch; with --model whole layers.

{OF_ROWS}

With --model: a layer of experts and its two products, activations in bf16 and weights in four bits,
as Hopper computes them, at the sizes of models. --tokens is --rows. Peers are Triton's own kernels
(triton_kernels: matmul_ogs and its routing, weights in the layout it has for the GPU, or as they
lie) and torch's grouped product of dequantised bf16. Weights are random codes and scale factors,
the same for all; what laying them out took is a table of its own. All peers take turns, as a CUDA
graph (of a plan, where a peer has plans) and as a call: a time is that between CUDA events behind a
flush of L2, without the host, whose own time for a call is beside it. What a peer computes is
compared with moe's first. The bound is what a large read and torch's product of bf16 square
matrices take on this GPU for as many bytes and FLOP; a weight has four bits and its share of a
scale factor, whatever a peer reads.""",
        "--model gpt-oss-120b --tokens 1 64 4k --routing random power-law",
    ),
    "kvcache": _steps(
        "kvcache", "What the KV cache moves", "--rows 1 128 2k 8k 32k --steps append gather"
    ),
    "dsv4": _steps(
        "dsv4",
        "What a layer of DeepSeek-V4 does with its cache",
        "--rows 1 32 128 --steps compress --names C4",
    ),
    "q8_0": _bench(
        "q8_0",
        q8_0.add_bench,
        """Kernels that read weights in Q8_0, in both layouts, beside a copy, a read and torch.

Times are medians of CUDA graph replays, per call, which rotate over weights of more than twice the
L2 cache. Whoever is compared takes turns. A copy reads and writes as many bytes as the problem has,
half each; a read is the maximum of as many bytes as int64; torch multiplies dequantised weights in
fp16. `matvec` takes x in bf16, `integer` and `product` in Q8_1: one token by dp4a, more by the
tensor cores. Results are compared with the reference before anything is timed. TOPS count a
multiplication and an addition each; the int8 peak is the data sheet's, dense.""",
        "--shapes 8192x2048 --tokens 1 16 2k --layouts soa --json out/q8_0.json",
    ),
    "kvcache-host": Command(
        "lab.bench.allocator",
        bench.add_host,
        """What the manager of the KV cache costs the host, beside vLLM's BlockPool.

Pools: `batch` blocks are taken and given back, over and over, from a pool of --blocks; `kept`: each
is registered by a new content before it goes back, so that all of them can be found and taking one
forgets it. Manager: a decode step of so many requests, the admission of a prompt that is there, one
that is not, the walk over all books. Numbers are medians over --repeats rounds. vLLM's pool runs
the loop of its own benchmark_block_pool.py where it is installed, or from a checkout with its
imports replaced. No GPU is needed.""",
        "--json results/kvcache_host.json",
    ),
    "kvcache-tier": Command(
        "lab.bench.host_tier",
        bench.add_tier,
        """How fast blocks go to the host's memory and back, and what decode beside them loses.

`memcpy`: a copy of each block by the copy engines, as `kvcache.memory.storage`; `kernel N`:
one launch of kvcache's own copy kernel with N CTAs, which reads or writes pinned memory over the
bus. They run on a stream of their own, again and again, while CUDA graphs of decode steps (all
layers over the same pool's pages) run on another one. Bytes are compared before anything is
measured.""",
        "--json results/kvcache_tier_h100.json",
    ),
    "emulator": Command(
        "lab.bench.emulator",
        bench.add_emulator,
        """How many warp-instructions per second ptxemu executes, and on what it spends its time.

A small problem of each family, plain and under the checker: the CPU time of the quickest launch
behind one that generates code, and the wall's. Shares are of the CPU time, from samples of the
stack: `arithmetic` is generated code and compiled blocks, `memory` loads, stores and copies of
every kind, `MMA` with its operands, `scheduling` warps and barriers, `host` the rest: the host
function, what the launch may touch, garbage collection.""",
        "--kernel decode append --json results/emulator_speed.json",
    ),
    "eager": Command(
        "lab.bench.eager",
        bench.add_eager,
        """What a repeated eager call costs the host, on CUDA tensors.

In place of a kernel's host function stands one that does nothing: what is left is the way from the
public function to the launch, also of operators whose kernels another GPU needs.""",
        "--json results/eager_h200.json",
    ),
    "first-call": Command(
        "lab.bench.first_call",
        bench.add_first_call,
        """Time the first call of each operator in a fresh process: compiled, cached, ahead of time.

Seconds beyond `import torch`, the making of a CUDA context and of the inputs; `ours` is what of
them finds or compiles the kernels, the rest is importing this package and running, in the emulator
mostly parsing PTX. On a GPU the call is captured in a CUDA graph and replayed behind it.""",
        "--operators decode merge --repeat 3",
    ),
    "units": Command(
        "lab.silicon.units.perform",
        add_units,
        """Unit costs of a Hopper GPU: what instructions, barriers, copies and launches take.

Small kernels in PTX measure themselves by the clock of their SM; two of them, or two lengths of a
loop, are subtracted from each other, so that figures are free of loops and clocks. The figures are
what cycle_model/parameters takes. A child does the work; one that faults or hangs is replaced, and
the row says why. Neither the DSL nor cuda-python is needed; `python -m lab.silicon.units` with
PYTHONPATH=scripts:. is the same command.""",
        "--json results/units_h200.json",
    ),
}


def _soak(subject: str, add: Add, about: str, example: str) -> Command:
    return Command("lab.soak.campaign", partial(_of, subject, add), about, example)


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
    "fmha": _soak(
        "attention",
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
    "gqa": _soak(
        "decode",
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
    "moe": _soak(
        "moe",
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
    "rows": _soak(
        "rows.family",
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
