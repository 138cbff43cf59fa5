"""What a KV cache needs and how many requests fit: a model, a GPU's memory, context lengths.

    python scripts/plan_kv.py --model deepseek-v4-pro --memory 141GB --weights 60GB
    python scripts/plan_kv.py --model path/config.json --context 8k:3,128k:1 --checkpoints 5%
    python scripts/plan_kv.py --record fp8 --record bf16 --plot plan.png --json plan.json

Nothing is allocated and no GPU is needed. All numbers are of one GPU that holds every KV head; k
and M of token counts are 1,024 and 1,048,576, GB is 10^9 bytes and GiB 2^30. For DeepSeek-V4 the
last table has vLLM's layout beside, rebuilt from its specs (sources:
scripts/workbench/plan/vllm.py).

What the words mean: a block holds `--block-tokens` tokens of all layers; a state is what a request
has beside its blocks (the windows' entries, rows that wait for compression); a checkpoint is a copy
of what a state holds at a block's boundary, for a prefix cache; stranded bytes belong to a request
and hold nothing that it needs. Blocks and states are pools of their own: `requests` is what fits at
`--context`, for which the memory is divided; `divided for it` is what another length would get if
the memory were divided for that. At a multiple of 128 tokens nothing waits in HCA tails, so the
most is stranded there, here as in vLLM.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvcache.layouts.models import BLOCK_TOKENS
from kvcache.layouts.presets import CONFIGS
from workbench.flags import kvcache as _kv_args

WORKSPACE_ROWS = 32768
LENGTHS = "128,1k,8k,64k,1M"


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments().parse_args(argv)
    from workbench.plan.kv import perform

    return perform(options)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser.add_argument_group("model"))
    add_memory_arguments(parser.add_argument_group("memory"))
    add_request_arguments(parser.add_argument_group("requests"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="everything, exact")
    output.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="requests over context length, and how the pools share the memory",
    )
    return parser


def add_model_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        action="append",
        metavar="NAME|PATH",
        help=f"repeatable: {', '.join(CONFIGS)}, or a config.json; default: deepseek-v4-pro",
    )
    group.add_argument(
        "--record",
        action="append",
        default=[],
        metavar="NAME",
        help="of the entries, repeatable: V4 fp8 | fp8-index8 | bf16, V4.1 fp4 | fp8 | bf16, "
        "V3.2 fp8 | bf16, plain keys and values bf16 | fp8; default: the first",
    )
    group.add_argument(
        "--block-tokens",
        type=_kv_args.count,
        default=BLOCK_TOKENS,
        metavar="N",
        help=f"of a block, a multiple of every ratio; default: {BLOCK_TOKENS}",
    )
    group.add_argument(
        "--draft",
        type=_kv_args.count,
        default=0,
        metavar="N",
        help="tokens of a step that may be taken back; default: 0",
    )
    group.add_argument(
        "--mtp",
        type=_kv_args.count,
        default=0,
        metavar="N",
        help="draft layers with a cache; default: 0",
    )
    group.add_argument(
        "--online-hca",
        action="store_true",
        help="tails of HCA layers hold a running softmax, not 128 rows",
    )


def add_memory_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--memory",
        type=_kv_args.memory,
        default="141GB",
        metavar="SIZE",
        help="of the GPU, as in 141GB or 80GiB; default: 141GB (an H200)",
    )
    group.add_argument(
        "--weights",
        type=_kv_args.memory,
        default=0,
        metavar="SIZE",
        help="of that what weights, activations and the rest take; default: 0B",
    )
    group.add_argument(
        "--checkpoints",
        type=_kv_args.reserve,
        default=(0, 0.0),
        metavar="N|P%",
        help="for copies of states, a number of them or a share of what the cache has; "
        "models without a state need none; default: 0",
    )
    group.add_argument(
        "--states",
        type=_kv_args.count,
        default=0,
        metavar="N",
        help="so many, and the rest for blocks; default: what fits the most requests",
    )
    group.add_argument(
        "--workspace",
        type=_kv_args.count,
        default=WORKSPACE_ROWS,
        metavar="ROWS",
        help="entries that are expanded to BF16 at a time, where the record is quantised; "
        f"default: {WORKSPACE_ROWS}",
    )


def add_request_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--context",
        type=_kv_args.mix,
        default="8k",
        metavar="N|N:W,...",
        help="tokens of a request, or several lengths with weights; the memory is divided for "
        "them; default: 8k",
    )
    group.add_argument(
        "--batch",
        type=_kv_args.count,
        default=0,
        metavar="N",
        help="never more requests than that; default: as many as fit",
    )
    group.add_argument(
        "--lengths",
        type=_kv_args.token_list,
        default=LENGTHS,
        metavar="N,...",
        help=f"context lengths of the tables; default: {LENGTHS}",
    )
    group.add_argument(
        "--batched-tokens",
        type=_kv_args.count,
        default=_kv_args.BATCHED_TOKENS,
        metavar="N",
        help=f"of a step, in vLLM's admission; default: {_kv_args.BATCHED_TOKENS}",
    )


if __name__ == "__main__":
    sys.exit(main())
