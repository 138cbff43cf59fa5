"""Runs a KV cache through the life of some requests and says what happened at every step.

Requests share beginnings, append through the kernels, are attended to over the cache's own pages,
forked, taken back, sent to the host's memory and fetched, preempted, and refused. Behind every step
all entries of all requests are compared with kvcache/movement/reference.py, byte for byte, and
attention with the fp64 definition over dense keys. A GPU of compute capability 9.0 or 10.x runs
the kernels itself, everywhere else the emulator does. Exit code 1 when a byte is wrong, attention
is out of tolerance or the checker finds an error, 2 when something is refused.

    python scripts/run_kvcache.py --model deepseek-v4-flash --record bf16 --layers 1
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvcache.layouts.presets import CONFIGS
from ptxemu.host.command_line import add_check_arguments
from workbench.flags.kvcache import PLAIN
from workbench.flags.run import add_backend_arguments


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=__doc__.rstrip().splitlines()[-1].strip()
    )
    group = parser.add_argument_group("cache")
    names = ", ".join((PLAIN, *CONFIGS))
    group.add_argument(
        "--model", default=PLAIN, help=f"{names}, or a config.json; default: {PLAIN}"
    )
    group.add_argument("--record", default="", help="of its entries, see kvcache.preset")
    group.add_argument("--layers", type=int, default=2, help="at most, of every array; default: 2")
    group.add_argument("--heads", type=int, default=2, help=f"KV heads of {PLAIN}; default: 2")
    group.add_argument("--dim", type=int, default=0, help="columns of a plain head")
    group.add_argument("--group", type=int, default=2, help="query heads of each; default: 2")
    group.add_argument("--window", type=int, default=0, help=f"of half of the layers of {PLAIN}")
    group.add_argument("--block-tokens", type=int, default=0, help=f"the model's, 16 of {PLAIN}")
    group.add_argument("--draft", type=int, default=0, help="tokens that can be taken back")
    group.add_argument("--canary", action="store_true", help="guards and checksums, looked at")
    group = parser.add_argument_group("run")
    group.add_argument("--steps", type=int, default=2, help="of decoding, after the prompts")
    group.add_argument("--chunk", type=int, default=0, help="tokens of a prompt in a step")
    add_backend_arguments(group, seed="of tokens, numbers and policies")
    group.add_argument("--arch", help="what the emulator runs: sm_100a (default) or sm_90a")
    group.add_argument("--events", action="store_true", help="what the prefix cache told")
    group.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    add_check_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(argv)
    from workbench.run.kvcache import perform

    return perform(options)


if __name__ == "__main__":
    sys.exit(main())
