"""The real vLLM and SGLang on our kernels, on a CPU: `python scripts/engines.py run llama`.

    python scripts/engines.py build
    python scripts/engines.py list
    python scripts/engines.py run gpt_oss fp8 --json out/engines.json
    python scripts/engines.py run mistral --fault window
    python scripts/engines.py load --engine vllm --requests 200 --at-once 8
    python scripts/engines.py newest

The engines are those of the index, without their compiled extensions, in an environment of their
own (out/engines, 2.3 GB); our kernels run in the emulator. `make engines` runs all of it as tests.
Exit code 0: every token was right; 1: one was not, or an engine failed; 2: refused."""

from __future__ import annotations

import sys
from functools import partial

import _checkout  # noqa: F401 - lab is found
from lab.engines.commands import ENGINES
from lab.tools.command import main_of

main = partial(main_of, ENGINES, __doc__)

if __name__ == "__main__":
    sys.exit(main())
