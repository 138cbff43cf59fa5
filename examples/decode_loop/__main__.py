"""The command line: `python -m examples.decode_loop --help`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from examples.decode_loop.cache import generate
from examples.decode_loop.model import Config, drawn, stored
from examples.decode_loop.reference import compare
from kernelkit.call.launch import emulation


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    made = argparse.ArgumentParser(
        prog="python -m examples.decode_loop",
        description="Greedy tokens of a Llama, Qwen2 or Qwen3 on the kernels of this repository: "
        "random and tiny, or a checkpoint. On a GPU if there is one, else in the emulator.",
    )
    add = made.add_argument
    add("--checkpoint", metavar="FOLDER", help="a checkpoint of Hugging Face (needs transformers)")
    add("--text", help="the prompt, for the tokenizer of the checkpoint")
    add("--prompt-len", type=int, default=20, help="tokens of each random prompt")
    add("--batch", type=int, default=2, help="number of random prompts")
    add("--new-tokens", type=int, default=4, help="tokens that follow each prompt")
    add("--parts", type=int, default=0, help="clusters that share a KV head; 0 chooses")
    add("--seed", type=int, default=0, help="seed of random weights and prompts")
    add("--check", action="store_true", help="compare with plain torch; exit code 1 if wrong")
    add("--device", choices=("cuda", "cpu"), help="a GPU if there is one, by default")
    add("--arch", help="architecture that the emulator compiles for, sm_100a by default")
    add("--json", metavar="FILE", help="write everything that was found")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 1 for wrong logits, or 2 for refused options."""
    options = parser().parse_args(arguments)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        with emulation(arch=options.arch) if device == "cpu" else nullcontext(), torch.no_grad():
            found = perform(options, device)
    except (ValueError, NotImplementedError) as refused:
        print(f"refused: {refused}", file=sys.stderr)
        return 2
    if options.json:
        text = json.dumps({"options": vars(options), **found}, indent=1)
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    return int(not all(each["right"] for each in found["checks"]))


def perform(options: argparse.Namespace, device: str) -> dict[str, Any]:
    """Generate tokens, print them, and return what was found."""
    if min(options.prompt_len, options.batch, options.new_tokens) < 1:
        raise ValueError("--prompt-len, --batch and --new-tokens are at least 1")
    folder, seed = options.checkpoint, options.seed
    model = stored(folder, device) if folder else drawn(Config(), seed, device)
    size = options.batch, options.prompt_len
    numbers = torch.Generator().manual_seed(seed)
    prompts = torch.randint(model.config.vocabulary, size, generator=numbers).tolist()
    tokenizer = None
    if options.text is not None:
        if not folder:
            raise ValueError("--text needs the tokenizer of a --checkpoint")
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        prompts = [tokenizer.encode(options.text)]
    start, steps, ends = time.perf_counter(), [], []
    for step in generate(model, prompts, options.new_tokens, options.parts):
        steps.append(step)
        ends.append(time.perf_counter() - start)  # its tokens are on the host, so it is over
    found = [list(tokens) for tokens in zip(*(chosen for chosen, _ in steps), strict=True)]
    logits = torch.stack([rows for _, rows in steps], dim=1)
    checks = []
    for number, tokens in enumerate(found):
        print(f"prompt {number}: {tokens if tokenizer is None else tokenizer.decode(tokens)}")
        if options.check:
            same, report = compare(model, prompts[number], tokens, logits[number])
            print(f"  {same} of {len(tokens)} tokens as in fp32; logits: {report}")
            checks.append({"same": same, "right": report.ok, "logits": str(report)})
    seconds = ends if device == "cuda" else None  # a CPU emulates
    return {"prompts": prompts, "found": found, "checks": checks, "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main())
