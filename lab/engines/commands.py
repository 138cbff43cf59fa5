"""What `scripts/engines.py` knows by name."""

from __future__ import annotations

import argparse

from lab.tools import groups
from lab.tools.command import Command

MODULE = "lab.engines.perform"


def _build(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action="build")


def _list(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action="list")


def _run(parser: argparse.ArgumentParser) -> None:
    words = "of `list`, or ENGINE/NAME; all runs without a name"
    parser.add_argument("names", nargs="*", metavar="NAME", help=words)
    words = "plant this fault into the adapter: slot, window or scale"
    parser.add_argument("--fault", default="", metavar="FAULT", help=words)
    groups.add_json(parser, "tokens, errors and calls of each run")
    parser.set_defaults(action="run")


def _load(parser: argparse.ArgumentParser) -> None:
    groups.add(parser, "engine", "whose server", "vllm", choices=("vllm", "sglang"))
    groups.add(parser, "model", "of `lab.engines.models`", "llama", type=str, metavar="NAME")
    groups.add(parser, "requests", "of random lengths", 200)
    groups.add(parser, "at-once", "of them in flight", 8)
    groups.add(parser, "seed", "of the requests", 0, type=groups.count)
    groups.add_json(parser, "the answers, and what was left")
    parser.set_defaults(action="load")


def _newest(parser: argparse.ArgumentParser) -> None:
    for engine in ("vllm", "sglang"):
        words = f"of {engine}, in place of the newest"
        parser.add_argument(f"--{engine}", metavar="VERSION", help=words)
    groups.add_json(parser, "what broke")
    parser.set_defaults(action="newest")


ENGINES = {
    "build": Command(MODULE, _build, "Build the environment, unless it is built."),
    "list": Command(MODULE, _list, "List the runs: model, options, what must be seen."),
    "run": Command(
        MODULE,
        _run,
        """Run scenarios, and judge their tokens beside transformers in float32.

Each is a process of the engine on a model of two layers; its log and the calls of our attention
stay in out/engines/runs. Exit code 1: a token was wrong, or something was not seen.
""",
        "gpt_oss fp8 --json out/engines.json",
    ),
    "load": Command(
        MODULE,
        _load,
        """Start a server, send random requests at once, leave some early, kill a second client.

Prints tokens that were wrong, what was compiled while requests waited, and what the cache still
holds afterwards, which must be nothing.
""",
        "--engine vllm --requests 200 --at-once 8",
    ),
    "newest": Command(
        MODULE,
        _newest,
        """Install the newest vLLM and SGLang of the index, and say by name what broke.

The interfaces that the adapters use are compared first, then one model runs on each engine.
""",
    ),
}
