"""Memory of a KV cache and how many requests fit, for a model, a GPU's memory, context lengths.

    python scripts/plan.py --model deepseek-v4-pro --memory 141GB --weights 60GB
    python scripts/plan.py --model path/config.json --context 8k:3,128k:1 --checkpoints 5%
    python scripts/plan.py --record fp8 --record bf16 --plot plan.png --json plan.json

Nothing is allocated and no GPU is needed. All numbers are for one GPU that holds every KV head.
Units: k and M of token counts are 1,024 and 1,048,576, GB is 10^9 bytes and GiB 2^30. For
DeepSeek-V4 the last table compares with vLLM's layout, rebuilt from its specs (sources:
lab/cache_model/vllm.py).

Terms:
  block           `--block-tokens` tokens of all layers
  state           a request's other data: the windows' entries, rows that wait for compression
  checkpoint      a copy of a state at a block's boundary, for a prefix cache
  stranded bytes  belong to a request and hold nothing that it needs
  requests        how many fit at `--context`, for which the memory is divided
  divided for it  how many would fit at another length if the memory were divided for that
Blocks and states live in separate pools. At a multiple of 128 tokens nothing waits in HCA tails, so
most bytes are stranded there, here as in vLLM.
"""

from __future__ import annotations

import sys
from functools import partial

import _checkout  # noqa: F401 - lab is found
from lab.flags import kvcache
from lab.tools.command import Command

COMMAND = Command("lab.cache_model.kv", kvcache.add_plan, __doc__)
main = partial(COMMAND.main, "plan.py")

if __name__ == "__main__":
    sys.exit(main())
