"""What a layer of DeepSeek-V4 does with its cache, beside torch and a copy of as many bytes.

    python scripts/bench.py dsv4 [--rows 1 32 128 1k 4k] [--steps compress] [--names C4]
    python scripts/bench.py dsv4 --show results/dsv4_h100.json [--markdown]      an earlier run's

Times are medians of CUDA graph replays, per call; see `bench.py kvcache`.
Results are compared with the reference before.

Published elsewhere: compressors in CuTe DSL, C4 10.0 us with one token, 9.8 with 128, 15.6 with
1024, 47.8 with 4096 (Triton: 22.1, 35.5 with 4096); C128 12.6 us with one token, 12.5 with 32,
28.2 with 128 (vLLM #43584, GPU not said). The best 512 keys of one row: 8.0 us of 4096, 9.0 of
16,384 (TensorRT-LLM #14602), about 15 of 262,144 (LMSYS on Lightning TopK).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench_kvcache import parse_arguments
from workbench.flags.bench import DSV4_STEPS

ROWS = (1, 32, 128, 1024, 4096)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(__doc__, DSV4_STEPS, ROWS, argv)
    from workbench.bench.kvcache import perform
    from workbench.cases.dsv4 import problems_of

    return perform(options, problems_of)


if __name__ == "__main__":
    sys.exit(main())
