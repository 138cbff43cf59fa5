"""What run.py, explain.py, dump.py, emulate.py, cycles.py, bench.py and soak.py know by name."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from lab.flags import attention, bench, cycles, decode, dsv4, kvcache, mla, moe, q8_0, soak, steps
from lab.silicon.units.flags import add_units
from lab.tools import groups
from lab.tools.command import Command
from ptxemu.host.command_line import add_check_arguments

Add = Callable[[argparse.ArgumentParser], None]

EXACT = """\
The GPU runs the kernel if it supports it; otherwise the emulator runs its PTX. Errors are measured
against the fp64 definition. Next to each error is that of a reference with the kernel's rounding
points. Exit code 1: out of tolerance, or the checker found an error; 2: refused.
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
        "Without flags for a case, four demonstration cases run.",
        "--head-dim 128 --causal --kv-len 512",
    ),
    "gqa": _run(
        "gqa",
        decode.add_run,
        f"Runs the decode kernel and prints how exact it is, and on a GPU how long it takes.\n\n"
        f"{EXACT}",
        "--kv-len 8k --kv-heads 8 --q-heads 64 --batch 1 --arch sm_90a",
    ),
    "mla": _run(
        "mla",
        mla.add_run,
        "Runs attention to latent keys, dense or of listed entries, and prints how exact it is.\n\n"
        f"{EXACT}",
        "--operation sparse_decode --heads 64 --tokens 4 --extra fp8_584 --kernel wgmma",
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
        """Runs MoE layers of models in the emulator, and prints how exact each variant is.

Routers, shared experts, biases and activations are those of the models; sizes are reduced. Errors
are relative to the definition with the same weights, in percent of the norm. Exit code 1: an error
above that of torch with the kernels' rounding points, or one found by the checker; 2: refused.""",
        "--model gpt-oss-120b",
    ),
    "kvcache": Command(
        "lab.verbs.life",
        partial(_checked, kvcache.add_run),
        """Runs a KV cache through the life of some requests and prints what happens at every step.

Requests share prefixes, append with the kernels, attend over the cache's pages, and are forked,
rolled back, sent to host memory and fetched, preempted, and refused. After every step, all entries
of all requests are compared byte for byte with kvcache/movement/reference.py, and attention with
the fp64 definition over dense keys. Exit code 1: a wrong byte, attention out of tolerance, or the
checker found an error; 2: something was refused.""",
        "--model deepseek-v4-flash --record bf16 --layers 1",
    ),
    "dsv4": Command(
        "lab.dsv4.perform",
        partial(_checked, dsv4.add_run),
        """Runs one layer of DeepSeek-V4 over the cache, and compares it with a plain model.

Prompts arrive in chunks while earlier requests decode. Every step compresses, indexes, selects,
attends and runs the experts with the repository's kernels. A plain torch model keeps all tokens and
recomputes everything in every step. Every component is compared with it, within a derived limit
(see lab/dsv4/judge.py). Weights are random and the width is reduced; head_dim 512, the windows and
the records are the model's. Exit code 1: something is out of its limit, or the checker found an
error; 2: the run is refused.""",
        "--kind csa --prefix 200 --steps 300",
    ),
    "q8_0": _run(
        "q8_0",
        q8_0.add_run,
        """Runs the kernels that read Q8_0 weights, in both layouts, and prints how exact they are.

A GPU runs the kernels; without one the emulator runs their PTX. Products are compared with fp64,
conversions with the reference bit for bit, and the two layouts with each other bit for bit. Exit
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
        "The plan of a decode case: keys of each CTA, and the map of its memory.\n\n"
        f"{STATIC} Without a GPU of --arch the number of\nclusters that run at once is unknown; "
        "it may make them narrower.",
        "--kv-len 8k --kv-heads 8 --q-heads 64",
    ),
    "mla": _explain(
        "mla",
        mla.add_static,
        "The plan of attention to latent keys: CTAs, roles, edges, the map of shared memory.\n\n"
        f"{STATIC} Without a GPU the number of clusters that run\nat once is unknown; it may make "
        "them narrower.",
        "--kv-len 8k --heads 128 --arch sm_90a --kernel wgmma",
    ),
    "moe": _explain(
        "moe",
        moe.add_product,
        "The plan of a layer's grouped GEMM: tiles, roles, and the map of memory.\n\n"
        f"{STATIC} --product chooses one of the two products.",
        "--model deepseek-v4-pro --tokens 64 --experts 8",
    ),
    "q8_0": _explain(
        "q8_0",
        q8_0.add_static,
        "The kernels that read weights in Q8_0: which one runs, its roles, and its memory.\n\n"
        f"{STATIC}",
        "--operations product --tokens 2k --arch sm_89",
    ),
    **{
        step: _explain(
            "steps",
            partial(steps.add_case, step),
            f"{about}\n\nPrints the kernels that it launches, their configs, and their plans.\n"
            "Nothing is compiled.",
        )
        for step, about in steps.ABOUT.items()
    },
}

# -- dump -----------------------------------------------------------------------------------------

SASS = """\
Registers and SASS need NVIDIA's cuobjdump and nvdisasm: `pip install '.[sass]'`."""


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
    "mla": _dump("mla", mla.add_static, "attention to latent keys", EXPLAIN["mla"].example),
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
    words = "number of the launch to draw, from 0 on"
    groups.add(group, "launch", words, shown="the one with the most instructions")
    groups.add(group, "cta", "CTA to draw", shown="the first with spans")
    groups.add_out(group, "out/timeline", "both files, without .json and .png")
    parser.set_defaults(name=name, backend="emulate")
    if name == "fmha":
        parser.set_defaults(**attention.PLAIN | {"kv_len": (512,)})


EMULATE = {
    name: Command(
        "lab.verbs.emulate",
        partial(_emulated, name),
        f"{command.title}\n\nRuns in the emulator and writes the timeline of one launch: a "
        "Perfetto trace, a picture, and\ncounts. Open the JSON at ui.perfetto.dev. Times are "
        "nominal: they show order and overlap,\nnot speed. The flags are those of run.py.",
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
The kernel runs in the emulator, which records what each warp does. Each warp is matched with the
machine code, which is replayed cycle by cycle with the parameters of a GPU. Nothing here is
measured; docs/cycle_model.md tells how accurate it is. Ranges come from those of the parameters."""


def _of_cycles(name: str, subject: str, add: Add, what: str, example: str = "") -> Command:
    about = f"Modelled time of {what} on a GPU, and where it goes.\n\n{MODELLED}"
    return Command("lab.cycles.perform", partial(_modelled, subject, add), about, example)


def _with_arch(add: Add, parser: argparse.ArgumentParser) -> None:
    add(parser)
    if "--arch" not in parser._option_string_actions:
        groups.add(parser, "arch", "what to compile for", choices=groups.SERVED,
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
    "mla": _of_cycles(
        "mla",
        "mla",
        partial(_with_arch, mla.add_case),
        "attention to latent keys",
        "--kv-len 4k --heads 128 --arch sm_90a --gpu H200",
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
        "MoE layers of models at their true sizes, compared with published times of others.\n\n"
        "Every kernel of moe.fused_moe runs in the emulator (some clusters of large grids) and is "
        "modelled as\none launch in a stream; weights come from memory. Nothing here is measured; "
        "docs/cycle_model.md tells\nhow accurate it is.",
        "--model gpt-oss-120b --tokens 1 64 4k",
    ),
    "beside": Command(
        "lab.cycles.beside",
        cycles.add_beside,
        "Measured times of kernels on a GPU, compared with the cycle model.\n\n"
        "Each row of the files is generated, run and modelled again, with the parameters of the "
        "file's GPU.\nPairs are rows of one step whose measured times differ by more than 10 %.",
        "results/model_h100/kvcache.json --only append gather --every 3",
    ),
    "mainloops": Command(
        "lab.cycles.mainloops",
        cycles.add_mainloops,
        "Published times of GEMM main loops in one CTA, compared with the cycle model.\n\n"
        "For each row a kernel of the same structure is recorded with a short K; each further step "
        "is as long as\nthe last rounds of its ring. The parameters tma_row, tma_write, "
        "tma_latency_l2 and tma_issue come from\nrows of this table, the others from elsewhere.",
        "results/published_mainloops_b200.csv --every 10",
    ),
    "published": Command(
        "lab.cycles.published",
        cycles.add_published,
        "FlashAttention-4, compared with times that others published.\n\n"
        "The DSL of this environment compiles its forward pass, or that of a checkout. It runs in "
        "the emulator\nand is modelled. A persistent kernel executes three tiles per CTA.",
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
twice the L2 cache. Warm: all calls read the same buffers. Peers are timed in alternation."""
OF_ROWS = f"""\
{COLD}
Calls rotate over at most 128 sets of buffers. Smaller problems are marked warm, and their time is
that of a launch. The copy reads and writes as many bytes as the problem has. Results are compared
with the reference before anything is timed."""
PUBLISHED = {
    "kvcache": """

Host: over the bus, compared with a memcpy per slot. Copies of slots move as many bytes as that
number of bf16 rows. Published elsewhere: dequantise and gather of 584-byte entries in CuTe DSL on a
GB200 (8 TB/s), 2.3 to 2.5 TB/s with 8192 rows, 4.1 to 4.4 with 32,000 (vLLM #42236, #55061).""",
    "dsv4": """

Published elsewhere: compressors in CuTe DSL, C4 10.0 us with one token, 9.8 with 128, 15.6 with
1024, 47.8 with 4096 (Triton: 22.1, 35.5 with 4096); C128 12.6 us with one token, 12.5 with 32,
28.2 with 128 (vLLM #43584, GPU not named). The best 512 keys of one row: 8.0 us out of 4096, 9.0
out of 16,384 (TensorRT-LLM #14602), about 15 out of 262,144 (LMSYS on Lightning TopK).""",
}


def _bench(subject: str, add: Add, about: str, example: str) -> Command:
    return Command("lab.bench.perform", partial(_of, subject, add), about, example)


def _steps(family: str, what: str, example: str) -> Command:
    about = f"{what}, compared with torch and a copy of as many bytes.\n\n{OF_ROWS}"
    about += PUBLISHED.get(family, "")
    return _bench("steps", partial(steps.add_bench, family), about, example)


def _moe_bench(parser: argparse.ArgumentParser) -> None:
    steps.add_bench("moe", parser)
    moe.add_models(parser)


BENCH = {
    "fmha": _bench(
        "fmha",
        bench.add_fmha,
        """Attention, compared with FlashAttention-4 and -2, cuDNN, FlashInfer; or static figures.

Times need a GPU. All peers of a problem alternate in rounds of a tenth of a second each, in a new
random order per round, since a GPU at its power limit slows down while it computes. A time is that
of a call between CUDA events, after a flush of L2 as in triton's do_bench, without the host. It is
the median over rounds of medians; the spread is that of the rounds. Before, each peer's result is
compared with fmha's: the line of a peer that is wrong, not installed, or does not support a problem
tells so. cudnn and fa2 are backends of torch's scaled_dot_product_attention. TFLOP/s count four
FLOP per visible pair and column; for a causal square, half of all pairs. SM clock and power are
read in the middle of rounds.

Rows: anchor has 16k tokens, heads x head dim = 2048, head dims 64, 128, 256, 1k to 16k keys, full
and causal; gpt-oss has 64/8 heads of 64 with sinks, with and without a window of 128; gqa 64/8
heads of 128; mla heads of 192, values of 128; hd512 64 query heads over one KV head of 512.

Static figures come from ptxas: registers, spills, the SASS of the softmax loop by kind, and where
in the loop statistics and P are published. They need `pip install '.[sass]'`.""",
        "--rows gpt-oss gqa --peers fmha fa4 --json out/fmha.json",
    ),
    "gqa": _bench(
        "gqa",
        bench.add_gqa,
        f"""Decode attention, compared with torch and FlashInfer; static figures without a GPU.

{COLD}
Every peer is timed in the same run on the same tensors, after its result has been compared with an
fp32 reference. The floor is the bytes of a launch at the bandwidth of a large read (torch.amax),
which is measured first.""",
        '--batch 1 8 64 --kv-len 1k 8k 64k --peers decode "torch cudnn"',
    ),
    "mla": _bench(
        "mla",
        mla.add_bench,
        f"""Attention to latent keys, dense and sparse, beside FlashMLA; or static figures.

{COLD}
Each peer's O and LSE are compared with an fp32 reference first, value by value. FlashMLA is the
package sgl-flash-mla; its schedule is made before it is timed. Without the package, or for a record
that it does not read, its line tells so.

Rows, one new token per entry: dense has 1 to 128 entries of 4k to 64k keys, in bf16, with 128, 64
and 16 heads; v4 lists 512 or 1,024 entries of 584 bytes and a window of 128; v3.2 lists 2,048
entries of 656 bytes; v4.1 those of v4 in 288 bytes, with a window in 528; prefill has 4,096 queries
that list 2,048, 640 or 1,152 entries in bf16. Bytes are those of the entries that each query reads,
however often, and of Q and O.""",
        "--rows dense v4 --heads 128 --json out/mla.json",
    ),
    "merge": _steps("merge", "Merging of attention results", "--rows 128 8k --names stack"),
    "moe": _bench(
        "moe",
        _moe_bench,
        f"""The steps around a MoE layer's products, compared with torch; with --model whole layers.

{OF_ROWS}

With --model: a layer of experts and its two products, activations in bf16 and weights in four bits,
as Hopper computes them, at the sizes of models. --tokens is --rows. Peers are Triton's own kernels
(triton_kernels: matmul_ogs and its routing, weights in its layout for the GPU, or as they are) and
torch's grouped product of dequantised bf16. Weights are random codes and scale factors, the same
for all; the time to arrange them is in a separate table. All peers alternate, as a CUDA graph (of a
plan, if a peer has plans) and as a call. A time is measured between CUDA events after a flush of
L2, without the host; the host's time for a call is next to it. Before, each peer's result is
compared with moe's. The bound is the time that a large read and torch's product of bf16 square
matrices need on this GPU for as many bytes and FLOP; a weight has four bits and its share of a
scale factor, whatever a peer reads.""",
        "--model gpt-oss-120b --tokens 1 64 4k --routing random power-law",
    ),
    "kvcache": _steps(
        "kvcache", "Data movement of the KV cache", "--rows 1 128 2k 8k 32k --steps append gather"
    ),
    "dsv4": _steps(
        "dsv4",
        "Steps of a DeepSeek-V4 layer with its cache",
        "--rows 1 32 128 --steps compress --names C4",
    ),
    "q8_0": _bench(
        "q8_0",
        q8_0.add_bench,
        """Kernels that read Q8_0 weights, in both layouts, compared with a copy, a read and torch.

Times are medians of CUDA graph replays, per call, which rotate over weights of more than twice the
L2 cache. Peers alternate. A copy reads and writes as many bytes as the problem has, half each; a
read is the maximum of as many bytes as int64; torch multiplies dequantised weights in fp16.
`matvec` has x in bf16, `integer` and `product` in Q8_1: one token with dp4a, more with the tensor
cores. Results are compared with the reference before anything is timed. TOPS count a multiplication
and an addition each; the int8 peak is that of the data sheet, dense.""",
        "--shapes 8192x2048 --tokens 1 16 2k --layouts soa --json out/q8_0.json",
    ),
    "kvcache-host": Command(
        "lab.bench.allocator",
        bench.add_host,
        """Host time of the KV cache's manager, compared with vLLM's BlockPool.

Pools: `batch` blocks are allocated and freed repeatedly from a pool of --blocks; `kept`: each block
is registered with new contents before it is freed, so that it can be found; allocating it evicts
them. Manager: a decode step of several requests, the admission of a prompt that is cached and of
one that is not, and check(), which visits all bookkeeping. Numbers are medians over --repeats
rounds. vLLM's pool runs the loop of its benchmark_block_pool.py if it is installed, or from a
checkout with its imports replaced. No GPU is needed.""",
        "--json results/kvcache_host.json",
    ),
    "kvcache-tier": Command(
        "lab.bench.host_tier",
        bench.add_tier,
        """Speed of block copies to host memory and back, and the slowdown of concurrent decoding.

`memcpy`: one copy per block by the copy engines, as in `kvcache.memory.storage`; `kernel N`:
one launch of kvcache's copy kernel with N CTAs, which reads or writes pinned memory over the bus.
The copies run repeatedly on a separate stream, while CUDA graphs of decode steps (all layers over
the same pool's pages) run on another one. Bytes are compared before anything is measured.""",
        "--json results/kvcache_tier_h100.json",
    ),
    "emulator": Command(
        "lab.bench.emulator",
        bench.add_emulator,
        """Warp instructions per second of ptxemu, and where its time goes.

A small problem of each family, with and without the checker: CPU and wall time of the fastest
launch after one that generates code. Shares are of the CPU time, from samples of the stack:
`arithmetic` is generated code and compiled blocks, `memory` loads, stores and copies of every kind,
`MMA` includes its operands, `scheduling` is warps and barriers, `host` the rest: the host function,
the memory that the launch may access, garbage collection.""",
        "--kernel decode append --json results/emulator_speed.json",
    ),
    "eager": Command(
        "lab.bench.eager",
        bench.add_eager,
        """Host time of a repeated eager call, on CUDA tensors.

The kernel's host function is replaced by one that does nothing. What remains is the time from the
public function to the launch, also for operators whose kernels need another GPU.""",
        "--json results/eager_h200.json",
    ),
    "toolchains": Command(
        "lab.bench.toolchains",
        bench.add_toolchains,
        """The same kernels, compiled by several versions of CuTe DSL and its libraries.

In each environment `--make FOLDER` compiles one or two calls of every family. A folder holds the
kernels, as of `python -m kernelkit aot`, and what became of each: failures, PTX version, registers,
instructions. Given several folders, a GPU runs them in a process for each, without a DSL. Results
are compared with the reference first. Then processes take turns, in a new random order per round; a
time is the median over turns of medians of CUDA graph replays, which alternate between sets of
buffers. With --times the static figures of one machine and the times of another make one file.""",
        "out/cu12 out/cu13 --json results/toolchains_h200.json",
    ),
    "first-call": Command(
        "lab.bench.first_call",
        bench.add_first_call,
        """Time the first call of each operator in a fresh process: compiled, cached, ahead of time.

Seconds without `import torch`, the creation of a CUDA context, and the inputs. `ours` is the part
that finds or compiles the kernels; the rest is importing this package and running (in the emulator
mostly parsing PTX). On a GPU the call is then captured in a CUDA graph and replayed.""",
        "--operators decode merge --repeat 3",
    ),
    "units": Command(
        "lab.silicon.units.perform",
        add_units,
        """Unit costs of a Hopper GPU: times of instructions, barriers, copies and launches.

Small kernels in PTX measure themselves with the clock of their SM. The times of two kernels, or of
two lengths of a loop, are subtracted, so that figures do not contain loops and clocks. The figures
are parameters for cycle_model/parameters. A child process does the work; one that faults or hangs
is replaced, and its row tells why. Neither the DSL nor cuda-python is needed;
`python -m lab.silicon.units` with PYTHONPATH=scripts:. is the same command.""",
        "--json results/units_h200.json",
    ),
}


def _soak(subject: str, add: Add, about: str, example: str) -> Command:
    return Command("lab.soak.campaign", partial(_of, subject, add), about, example)


SOAK = {
    "kvcache": Command(
        "lab.soak.random_caches",
        kvcache.add_soak,
        """Long run of kvcache's manager: random operations, compared with the tests' naive model.

Every operation is followed by check(), a replay of the events, and a comparison of all bytes that
the affected requests still need; every --every operations everything is compared. Pools and policy
are those of the tests for one seed in four, and random otherwise. A failure stops the run; its
operations are reduced to the fewest that still fail, and stored. Exit code 0: nothing failed; 1:
something did.
""",
        "--operations 50k --layout sparse --seed 7",
    ),
    "fmha": _soak(
        "attention",
        partial(soak.add_campaign, soak.OF_ATTENTION),
        """Random attention problems on this GPU, each twice, compared with fp64 on the same GPU.

Kernels are drawn from the whole space of options and tunable fields; configs that the plan refuses
are left out and counted. Processes compile them, and the problems of a kernel run as soon as it is
compiled: random lengths (odd, zero, at the edges of tiles), NaN after every length, around every
tensor and in every unused page, scores that are huge, zero, or rising. The bits must be equal from
run to run, and errors within the tolerance of kernelkit/numerics/tolerance.py. Everything is drawn
from --seed: a problem keeps its number for any flags except --small, --long and the architecture.
Failures print a command that repeats them, and go to out/soak_fmha_failures.json. The emulator runs
a few small problems, the second time with an adversarial schedule. Exit code 0: nothing failed; 1:
something did; 2: refused.
""",
        "--configs 60 --problems 3000 --minutes 8 --json out/soak_fmha.json",
    ),
    "gqa": _soak(
        "decode",
        partial(soak.add_campaign, soak.OF_DECODE),
        """Random decode steps on this GPU, each twice, compared with fp64 on the same GPU.

Kinds of steps are drawn from the whole space of options, clusters and tunable fields; configs that
the plan refuses are left out and counted. Processes compile the kernels, and the problems of a kind
run as soon as they are compiled: random batches and lengths (zero, a few, near the edges of tiles),
NaN after every length, around every tensor and in every unused page, scores that are zero, large,
rising, or far below 0. The bits must be equal from run to run, and errors within the tolerance of
kernelkit/numerics/tolerance.py. Everything is drawn from --seed: a problem keeps its number for any
flags except --small, --long and the architecture. Failures print a command that repeats them, and
go to out/soak_gqa_failures.json. The emulator runs a few small problems, the second time with an
adversarial schedule. Exit code 0: nothing failed; 1: something did; 2: refused.
""",
        "--configs 60 --problems 3000 --minutes 8 --json out/soak_gqa.json",
    ),
    "mla": _soak(
        "latent",
        partial(soak.add_campaign, soak.OF_LATENT, archs=groups.ALL_ARCHS),
        """Random attention to latent keys on this GPU, each twice, compared with fp64 on it.

Kinds of calls are drawn from the whole space of `mla.decode`, `sparse_decode` and `sparse_prefill`:
every record, one cache or two, kernels, clusters, parts; configs that the plan refuses are left out
and counted. Processes compile the kernels, and the problems of a kind run as soon as they are
compiled: random lengths and numbers of entries (zero, a few, near the edges of tiles), entries that
do not exist, NaN in all that no query reads. The bits must be equal from run to run, and errors
within the tolerance of kernelkit/numerics/tolerance.py. Everything is drawn from --seed: a problem
keeps its number for any flags except --small, --long and the architecture. Failures print a command
that repeats them, and go to out/soak_mla_failures.json. The emulator runs a few small problems, the
second time with an adversarial schedule. Exit code 0: nothing failed; 1: something did; 2: refused.
""",
        "--configs 60 --problems 3000 --minutes 8 --json out/soak_mla.json",
    ),
    "moe": _soak(
        "moe",
        partial(soak.add_campaign, soak.OF_EXPERTS),
        """Random products and layers of experts in four bits, on this Hopper GPU.

Each problem runs twice and is compared with fp64 on the same GPU. Two of three kernels are those of
`mixed_gemm`, with any tile, format, activation, bias and gathered rows. The others are whole layers
with `fused_moe`: routers, shared experts, experts of a rank, tokens that all choose one expert or
only experts of other ranks. Processes compile them, and the problems of a kernel run as soon as it
is compiled: experts without rows, rows at the edges of tiles, NaN around every tensor, in unused
rows and in tokens that no slot names. The bits must be equal from run to run, and errors within the
tolerance of kernelkit/numerics/tolerance.py. Everything is drawn from --seed: a problem keeps its
number for any flags except --small and --large. Failures print a command that repeats them, and go
to out/soak_moe_failures.json. The emulator runs a few small problems, the second time with an
adversarial schedule. Exit code 0: nothing failed; 1: something did; 2: refused.
""",
        "--configs 60 --problems 3000 --minutes 8 --json out/soak_moe.json",
    ),
    "rows": _soak(
        "rows.family",
        soak.add_rows,
        """A row's result does not depend on other rows: random calls of every family, each twice.

The second time one row, such as a token, has other contents: NaN, infinities, numbers near 1e30,
subnormal numbers, zeros, or other experts. The bits of all other rows must be the same. Kinds of
calls are drawn from all subjects in rotation; each has many problems, which share its kernels.
Everything is drawn from --seed: a problem keeps its number for any flags except --small and the
architecture. Failures print a command that repeats them, and go to out/soak_rows_failures.json.
Exit code 0: nothing failed; 1: something did; 2: refused.
""",
        "--configs 100 --problems 50000 --minutes 8 --json out/soak_rows.json",
    ),
}
