"""FlashAttention-3 from a wheel: `fa3_fwd` (forward only, 28 MB) or `flash_attn_interface`.

e4m3 inputs have a decode scale of 1 for each request and KV head, which is what its kernels take
where none is given. O is in bf16.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from lab.bench.peers.run import Run

DISTRIBUTIONS = ("fa3-fwd", "flash-attn-3", "tokenspeed-fa3")
MODULES = ("fa3_fwd_interface", "flash_attn_interface")  # the first that is installed


def module() -> str:
    """Return the module that is installed, "" if none is."""
    return next((name for name in MODULES if importlib.util.find_spec(name)), "")


def available() -> str:
    """Return why it cannot run here, "" if it can."""
    if not module():
        return f"not installed: {' or '.join(MODULES)}"
    if not torch.cuda.is_available():
        return "there is no GPU"
    major, _ = torch.cuda.get_device_capability()
    return "" if major == 9 else "its kernels with FP8 are for Hopper"


def arguments(problem: Any) -> dict[str, Any]:
    """Return the keywords of `flash_attn_func` for a problem of `bench.py fmha`.

    Raises NotImplementedError for sinks and mixed dtypes, which it does not take.
    """
    if problem.sinks:
        raise NotImplementedError("it takes no sinks")
    if problem.kv_dtype not in ("", problem.dtype):
        raise NotImplementedError("q, k and v have one dtype")
    given: dict[str, Any] = {"causal": problem.causal, "softmax_scale": problem.head_dim**-0.5}
    if problem.window is not None:
        given["window_size"] = (problem.window, 0 if problem.causal else -1)
    return given


def prepare(problem: Any, inputs: Any) -> Run:
    """Return the call of a problem of `bench.py fmha`; refusals as of `arguments`."""
    given = arguments(problem)
    function = importlib.import_module(module() or MODULES[0]).flash_attn_func

    def launch() -> torch.Tensor:
        found = function(inputs.q, inputs.k, inputs.v, **given)
        return found[0] if isinstance(found, tuple) else found

    return Run(launch, torch.Tensor.float)
