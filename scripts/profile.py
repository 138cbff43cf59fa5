"""Nsight Compute or Nsight Systems on the run script of a kernel.

    python scripts/profile.py fmha --tool ncu -- --shape 2,4096,4096,16,16 --causal

Without the tool it prints the command line to use elsewhere.
"""

import importlib.util
import sys
import sysconfig
from pathlib import Path

if __name__ == "__main__":
    from _profile import main

    sys.exit(main())

# `import profile` means the standard library's module, which cProfile, and so torch, needs. Beside
# this file it finds this file: hand out the other one.
_path = Path(sysconfig.get_path("stdlib")) / "profile.py"
_spec = importlib.util.spec_from_file_location(__name__, _path)
sys.modules[__name__] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules[__name__])
