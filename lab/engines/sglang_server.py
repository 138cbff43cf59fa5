"""SGLang's server on a CPU: `python -m lab.engines.sglang_server WORD ...`, the words of
`sglang.launch_server`.
"""

from __future__ import annotations

import runpy

from lab.engines.sglang_harness import install

install()  # in the processes of the engine, too: each imports this file again

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
