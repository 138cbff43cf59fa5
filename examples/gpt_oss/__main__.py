"""The command line: `python -m examples.gpt_oss --help`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from examples.gpt_oss import report
from examples.gpt_oss.compare import compare, transformers_model
from examples.gpt_oss.config import CONFIGS, Config, named, of_folder
from examples.gpt_oss.engine import DECODE, PREFILL, Engine, Job
from examples.gpt_oss.floors import Speed, part_table, parts_of, work_of
from examples.gpt_oss.model import Model
from examples.gpt_oss.ranks import Ranks, reach_each_other
from examples.gpt_oss.weights import KINDS, Drawn, Source, Stored, load
from kernelkit.call.launch import emulation

PROFILED = 8  # decoding steps


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    made = argparse.ArgumentParser(
        prog="python -m examples.gpt_oss",
        description="gpt-oss from prompt to tokens on the kernels of this repository, on a GPU if "
        "there is one, else, tiny, in the emulator.",
    )
    add = made.add_argument
    add("--model", choices=[*CONFIGS], default="tiny", help="sizes; weights are drawn at random")
    add("--checkpoint", metavar="FOLDER", help="weights and config.json of a checkpoint instead")
    add("--seed", type=int, default=0, help="of weights and prompts")
    add("--normal-experts", action="store_true",
        help="draw experts that MXFP4 has to round, not some that it holds")  # fmt: skip
    add("--decided", action=argparse.BooleanOptionalAction, default=None,
        help="draw weights that amplify no roundings and are sure of the next token, so that "
        "greedy tokens can be compared; by default for all models but the tiny one")  # fmt: skip
    add("--experts", choices=KINDS, default="mxfp4", help="what experts are multiplied in")
    add("--batch", type=int, default=1, help="requests at a time")
    add("--requests", type=int, help="requests in all, as many as --batch by default")
    add("--prompt-len", type=int, default=20, help="tokens of a prompt")
    add("--shared-len", type=int, default=0, help="tokens that all prompts begin with")
    add("--new-tokens", type=int, default=8, help="tokens that follow a prompt")
    add("--chunk", type=int, default=8192, help="tokens of a prefill, at most")
    add("--graph", action=argparse.BooleanOptionalAction, default=None,
        help="decoding steps as CUDA graphs; by default on a GPU")  # fmt: skip
    add("--tp", action="store_true", help="under torchrun: share heads over the ranks")
    add("--ep", action="store_true", help="under torchrun: share experts over the ranks")
    add("--cp", action="store_true", help="under torchrun: share tokens of prompts over the ranks")
    add("--one-shot", action=argparse.BooleanOptionalAction, default=None,
        help="sum few tokens by one launch, in which a GPU reads what all have; by default where "
        "all are in one host and can")  # fmt: skip
    add("--compile", action="store_true", help="torch.compile what is between the kernels")
    add("--fuse", action=argparse.BooleanOptionalAction, default=True,
        help="decode few requests in fused launches")  # fmt: skip
    add("--padded", type=int, help="tokens of a prefill that is padded, at most; 4096 on a GPU")
    add("--share", action=argparse.BooleanOptionalAction, default=None,
        help="begin a prompt with what is kept of another; by default, but for --cp")  # fmt: skip
    add("--repeats", type=int, default=1, help="runs that are timed, with other prompts each")
    add("--warm-up", action=argparse.BooleanOptionalAction, default=None,
        help="run other prompts of the same sizes first; by default on a GPU")  # fmt: skip
    add("--compare", action="store_true", help="transformers' own model with the same weights")
    add("--their-attention", default="eager", help="attn_implementation of that model")
    add("--their-experts", help="experts_implementation of that model, transformers' choice else")
    add("--their-cache", default="dynamic", help="cache_implementation of that model")
    add("--profile", action="store_true", help="on a GPU: a table of all kernels")
    add("--device", choices=("cuda", "cpu"), help="a GPU if there is one, by default")
    add("--arch", default="sm_90a", help="what the emulator runs kernels of")
    add("--json", metavar="FILE", help="write everything that was found")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 for refused options."""
    options = parser().parse_args(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    emulated = emulation(arch=options.arch) if device.type == "cpu" else nullcontext()
    try:
        if options.repeats < 1:
            raise ValueError(f"--repeats {options.repeats}: at least 1")
        if options.profile and device.type != "cuda":
            raise ValueError("--profile: there is no time on a CPU, where kernels are emulated")
        ranks, device = _joined(options, device)
        # All ranks produce equal results; one of them prints.
        quiet = redirect_stdout(None) if ranks is not None and ranks.rank else nullcontext()
        with emulated, quiet:
            return _perform(options, device, ranks)
    except (ValueError, NotImplementedError) as refused:
        print(f"refused: {refused}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _joined(options: argparse.Namespace, device: torch.device) -> tuple[Ranks | None, torch.device]:
    """The ranks that torchrun started, if they share the model, and this one's device."""
    if not (options.tp or options.ep or options.cp):
        return None, device
    if "WORLD_SIZE" not in os.environ:
        raise ValueError("--tp, --ep, --cp: torchrun --nproc-per-node 2 -m examples.gpt_oss --ep")
    if options.one_shot and device.type != "cuda":
        raise ValueError(f"--one-shot on {device.type}: it is for GPUs")
    if options.compare:
        raise ValueError("--compare with --tp, --ep or --cp: transformers' model is on one GPU")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    shared = options.tp, options.ep, options.cp
    place = dist.get_rank(), dist.get_world_size()
    one_shot = reach_each_other(device) if options.one_shot is None else options.one_shot
    return Ranks(*place, *shared, one_shot=one_shot), device


def _perform(options: argparse.Namespace, device: torch.device, ranks: Ranks | None) -> int:
    config, source = _source(options, device, ranks)
    tokens = options.prompt_len + options.new_tokens
    progress = sys.stderr.isatty()
    weights = load(config, source, experts=options.experts, progress=progress)
    model = Model(
        config, weights, tokens, compiled=options.compile, fuses=options.fuse, ranks=ranks
    )
    engine = Engine(
        model, requests=options.batch, tokens=tokens, chunk=options.chunk, graph=options.graph,
        share=not options.cp if options.share is None else options.share,
        keep_logits=options.compare, padded=options.padded,
    )  # fmt: skip
    print(f"{config.name}, experts in {options.experts}, {_words(engine)}")
    on_gpu = device.type == "cuda"
    compared: list[Job] = []
    if options.compare and on_gpu:  # a step that keeps logits takes longer, so not what is timed
        prompts = _prompts(options, config, options.seed + 3)
        compared = _served(engine, prompts, options.new_tokens)
        engine.keep_logits = False
        engine.took.clear()
    warms_up = on_gpu if options.warm_up is None else options.warm_up
    if warms_up and not compared:  # which would have done it already
        _served(engine, _prompts(options, config, options.seed + 1), min(3, options.new_tokens))
        engine.took.clear()
    for repeat in range(options.repeats):
        prompts = _prompts(options, config, options.seed + 1000 * repeat)
        jobs = _served(engine, prompts, options.new_tokens)
    found: dict[str, Any] = {"options": vars(options), "rates": report.rates(engine.took)}
    hits = sum(job.hit for job in jobs)
    print(*report.speed_lines(found["rates"], on_gpu), f"tokens that were shared: {hits}", sep="\n")
    found["memory"] = report.memory(engine)
    print(report.memory_line(found["memory"]))
    print(f"first tokens: {jobs[0].found[:16]}")
    if options.profile:
        found["kernels"] = _profile(engine, options, config)
    if options.compare:
        theirs = transformers_model(model, source, options.their_attention)
        if options.their_experts:
            theirs.set_experts_implementation(options.their_experts)
        beside = compare(theirs, source, compared or jobs, options.their_cache)
        print(*report.comparison_lines(beside, found["rates"], on_gpu), sep="\n")
        found["comparison"] = beside
    if options.json and (ranks is None or not ranks.rank):
        text = json.dumps(report.document(engine, **found), indent=1)
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    return 0


def _source(
    options: argparse.Namespace, device: torch.device, ranks: Ranks | None
) -> tuple[Config, Source]:
    """Return this rank's config and its source of weights."""
    source: Source
    if options.checkpoint:
        config, source = of_folder(options.checkpoint), Stored(options.checkpoint, device, ranks)
    else:
        config = named(options.model)
        decided = options.model != "tiny" if options.decided is None else options.decided
        source = Drawn(config, device, options.seed, options.normal_experts, ranks, decided)
    return config if ranks is None else ranks.config(config), source


def _words(engine: Engine) -> str:
    """Describe the device, and how decoding is launched."""
    device = engine.model.device
    if device.type != "cuda":
        return "in the emulator"
    how = "as CUDA graphs" if engine.graph else "launch by launch"
    return f"on {torch.cuda.get_device_name(device)}, decoding {how}"


def _prompts(options: argparse.Namespace, config: Config, seed: int) -> list[list[int]]:
    numbers = torch.Generator().manual_seed(seed)
    count = options.requests or options.batch
    size = count, options.prompt_len
    drawn = torch.randint(0, config.vocabulary, size, generator=numbers)
    drawn[:, : options.shared_len] = drawn[0, : options.shared_len]
    return drawn.tolist()


def _served(engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Job]:
    """Jobs that are over."""
    jobs = [engine.submit(f"request {n}", each, new_tokens) for n, each in enumerate(prompts)]
    while engine.step():
        pass
    return jobs


def _profile(engine: Engine, options: argparse.Namespace, config: Config) -> dict[str, Any]:
    """Return profiles of a batch's prefill and of the decoding steps after it."""
    prompts = _prompts(options, config, options.seed + 2)[: options.batch]
    steps = min(PROFILED, options.new_tokens - 1)
    jobs = [
        engine.submit(f"profiled {number}", prompt, options.new_tokens)
        for number, prompt in enumerate(prompts)
    ]
    speed = Speed.measured(engine.model.device)

    def prefill() -> None:
        while engine.queue or any(not job.found for job in engine.running):
            engine.step()

    def decode() -> None:
        for _ in range(steps):
            engine.step()

    ranks, found = engine.model.ranks, dict[str, Any](speed=speed)
    for name, run, count in ((PREFILL, prefill, 1), (DECODE, decode, steps)):
        if not count:
            continue
        kernels, busy = report.profiled(run)
        hits, lengths = [job.hit for job in jobs], [len(job.prompt) for job in jobs]
        added = [1] * len(jobs)
        if name == PREFILL:
            added, lengths = [x - hit for x, hit in zip(lengths, hits, strict=True)], hits
        shares = {} if ranks is None else ranks.shares(prefill=name == PREFILL)
        work = work_of(config, engine.model.weights, added, lengths, **shares)
        parts = parts_of(kernels, count, work, speed)
        found[name] = {"steps": count, "kernels": kernels, "busy": busy, "parts": parts}
        print(f"kernels of {name}:", *report.kernel_table(kernels, count, busy), sep="\n")
        print(*part_table(parts), sep="\n")
    while engine.step():
        pass
    return found


if __name__ == "__main__":
    sys.exit(main())
