"""Peers of `cycles.py NAME --peers`: other people's kernels for the same case."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import io
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cycle_model.gpus import B200
from cycle_model.parameters.parameter import Gpu
from lab.problems.attention import Case
from ptxemu.host.emulator import Emulator
from ptxemu.host.gpu_machine import machine_with_gpu
from ptxemu.host.patching import environment, patched
from ptxemu.record.recording import Recording
from ptxemu.report import LaunchReport
from ptxemu.watch import watched

Call = Callable[[], object]
Peer = Callable[[argparse.Namespace], Any]  # a context whose value is the call
HOW_TO_GET_CUTLASS = "CUTLASS's kernels are not installed: pass a checkout with --cutlass"
_OF_CUTLASS = "fmha.py"  # its attention, somewhere below _EXAMPLES
_EXAMPLES = Path("examples", "python", "CuTeDSL")
# what neither of them has, by the name of a case's field and its value without it
_OURS_ALONE = {"sink_tokens": 0, "tree": "", "mask": "", "blocks": 0, "kv_lens": None,
               "q_lens": None, "k_lens": None, "page_size": 0, "rope_dim": 0, "q_offset": None,
               "normalize": True}  # fmt: skip


def peers_of(subject: str) -> dict[str, Peer]:
    """Return the peers by name; raise ValueError for a subject without any."""
    if subject not in PEERS:
        raise ValueError(f"--peers: there are none for {subject!r}, only for {', '.join(PEERS)}")
    return PEERS[subject]


def launched(call: Call, clusters: Any) -> list[LaunchReport]:
    """Return a peer's launches, without those that make its inputs, and each repeated launch
    once.

    clusters: an option of the emulator."""
    silent = redirect_stdout(io.StringIO())
    with silent, watched(record=True, limit=None, clusters=clusters) as report:
        call()
    own = itertools.dropwhile(lambda each: not each.counts["mma.flops"], report.launches)
    return list({(each.entry, each.grid): each for each in own if each.recording}.values())


@contextmanager
def _flash(options: argparse.Namespace) -> Iterator[Call]:
    case = _case(options, ())
    if options.source:
        from_source(options.source)
    with flash_attention() as function:
        q, k, v = (tensor.contiguous() for tensor in case.inputs("cpu"))
        given: dict[str, Any] = {"causal": case.causal, "softcap": case.softcap}
        given |= {"softmax_scale": case.scale}
        if case.window != (None, None):
            given |= {"window_size": case.window}
        if case.sinks:
            given |= {"learnable_sink": case.arguments()["sinks"].bfloat16()}
        yield lambda: function(q, k, v, **given)


@contextmanager
def _flash_decode(options: argparse.Namespace) -> Iterator[Call]:
    """Yield FlashAttention's decode call, which uses several heads of a token as rows and splits
    keys."""
    from lab.problems.gqa import case_of

    case = case_of(options)
    if case.arch not in (None, "sm_100a"):
        raise ValueError(f"it is modelled for sm_100a, not {case.arch}")
    _without(case, {"page_size": 0, "sinks": False, "scales": False, "kv_dtype": ""})
    if len(set(case.lengths)) > 1:
        raise ValueError(f"it has no lengths of each entry here: {case.lengths}")
    asked = SimpleNamespace(**case.options)
    _without(asked, {"window": None, "sink_tokens": 0, "out_dtype": None})
    if options.source:
        from_source(options.source)
    with flash_attention() as function:
        given = {name: case.options[name] for name in ("causal", "softcap")}
        yield lambda: function(*case.tensors, **given, num_splits=0)  # as many as it chooses


@contextmanager
def _cutlass(options: argparse.Namespace) -> Iterator[Call]:
    case = _case(options, ("softcap", "sinks"))
    if not options.cutlass:
        raise ValueError(HOW_TO_GET_CUTLASS)
    paths = sorted((options.cutlass / _EXAMPLES).rglob(f"blackwell/**/{_OF_CUTLASS}"))
    if not paths:
        raise ValueError(f"{options.cutlass}: has no {_EXAMPLES}/**/{_OF_CUTLASS}")
    with machine_with_gpu(Emulator()):
        sys.path.insert(0, str(options.cutlass / _EXAMPLES))  # its helpers
        try:
            yield _example(paths[0], case)
        finally:
            sys.path.pop(0)


def _example(path: Path, case: Case) -> Call:
    """CUTLASS's attention has a function `run` that draws the inputs itself."""
    import cutlass

    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    q_heads, kv_heads = case.heads
    io = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}.get(case.dtype)
    if io is None:
        raise ValueError(f"CUTLASS's attention in {case.dtype}")
    given = {
        "q_shape": (case.batch, case.sq, q_heads, case.dims[0]),
        "k_shape": (case.batch, case.skv, kv_heads, case.dims[0]),
        "qk_dtype": io, "pv_dtype": io, "in_dtype": io, "out_dtype": io,
        "enable_ex2_emulation": True, "enable_skip_correction": True,
        "qk_acc_dtype": cutlass.Float32, "pv_acc_dtype": cutlass.Float32,
        "mma_tiler_mn": (128, 128), "is_persistent": not case.causal, "is_causal": case.causal,
        "bottom_right_align": True, "lse_calculation": False, "window_size": _sides(case),
        "scale_q": 1.0, "scale_k": 1.0, "scale_v": 1.0, "inv_scale_o": 1.0,
        "scale_softmax": case.scale or case.dims[0] ** -0.5, "tolerance": 0.1,
        "warmup_iterations": 0, "iterations": 1, "skip_ref_check": True, "use_cold_l2": False,
        "skip_softmax_threshold": None,
    }  # fmt: skip
    taken = _taken(module.run, given)

    def call() -> None:
        with patched(module.testing, {"benchmark": _once}):
            module.run(**taken)

    return call


def _once(
    function: Callable[..., object], *, workspace_generator: Callable[[], Any], **_: object
) -> float:
    """Replace a benchmark by one launch, which is the slow part here."""
    given = workspace_generator()
    function(*given.args, **given.kwargs)
    return 1.0


def _sides(case: Case) -> tuple[int, int]:
    left, right = (-1 if side is None else side for side in case.window)
    return left, right


def _taken(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that this version's function accepts; raise ValueError if others are
    required."""
    wanted = inspect.signature(function).parameters
    needed = [
        name
        for name, each in wanted.items()
        if each.default is each.empty and each.kind is not each.VAR_KEYWORD
    ]
    missing = [name for name in needed if name not in given]
    if missing:
        raise ValueError(f"CUTLASS's attention asks for {', '.join(missing)}")
    return {name: value for name, value in given.items() if name in wanted}


@contextmanager
def _frost(options: argparse.Namespace) -> Iterator[Call]:
    case = _case(options, ("softcap",))
    left, right = case.window
    if right is not None or (left is not None and not case.causal):
        raise ValueError(f"it has no window={case.window} here")
    q, k, v = (tensor.transpose(1, 2) for tensor in case.inputs("cpu"))
    given = {"is_causal": case.causal, "causal_bottom_right": case.causal and case.sq != case.skv,
             "window_size_left": left, "scale_softmax": case.scale}  # fmt: skip
    if case.sinks:
        given["sinks"] = case.arguments()["sinks"].float()
    with frost() as function:
        yield lambda: function(q, k, v, **given)


def _case(options: argparse.Namespace, more: tuple[str, ...]) -> Case:
    """Case of the flags. ValueError for what the peer does not have; more: fields beyond the
    common."""
    from lab.problems.fmha import case_of

    case = case_of(options)
    _without(case, {**_OURS_ALONE, **dict.fromkeys(more, 0)})
    return case


def _without(case: object, values: dict[str, Any]) -> None:
    """ValueError for a field of a case that has another value than that of not being there."""
    for name, value in values.items():
        if (found := getattr(case, name)) != value:
            raise ValueError(f"it has no {name}={found}")


PEERS: dict[str, dict[str, Peer]] = {
    "fmha": {"FlashAttention-4": _flash, "FROST": _frost, "CUTLASS's attention": _cutlass},
    "gqa": {"FlashAttention-4": _flash_decode},
}


# FlashAttention-4 where it is installed: what its forward pass launches, recorded.
#
# Any version will do, with the DSL that it was written for: `ptxemu` runs in its environment, so
# that the machine code is that of the compiler in question.


HOW_TO_GET_FLASH = (
    "FlashAttention-4 is not installed: `pip install flash-attn-4 quack-kernels triton`, or name a "
    "checkout of flash-attention with --source"
)
_GOLDEN = 0.6180339887  # its multiples leave no gap, whatever the period of the grid


@dataclass(frozen=True)
class Shape:
    """Shape of one forward pass; seqlen both of queries and of keys."""

    head_dim: int
    causal: bool
    batch: int
    seqlen: int
    heads: int
    kv_heads: int

    @property
    def flops(self) -> float:
        """Count operations as benchmarks do: half of the products if causal."""
        products = self.batch * self.heads * self.seqlen**2 * self.head_dim
        return 4 * products / (2 if self.causal else 1)


def from_source(folder: Path) -> None:
    """Take `flash_attn.cute` from a checkout; its `flash_attn` itself would ask for a CUDA library.
    ValueError where there is none."""
    if not (folder / "flash_attn" / "cute").is_dir():
        raise ValueError(f"{folder}: has no flash_attn/cute")
    package = types.ModuleType("flash_attn")
    package.__path__ = [str(folder / "flash_attn")]
    sys.modules["flash_attn"] = package


@contextmanager
def flash_attention(gpu: Gpu = B200) -> Iterator[Callable[..., Any]]:
    """Yield FlashAttention's function on a simulated machine with that GPU. The code depends on
    its architecture and number of SMs. Use one GPU per process, since it caches what it has
    compiled. Raise ValueError, with how to install it, if it or a dependency is missing."""
    chosen = {"CUTE_DSL_ARCH": gpu.arch, "FLASH_ATTENTION_ARCH": gpu.arch}
    with environment(chosen), machine_with_gpu(Emulator()), _multiprocessors(gpu.sms):
        try:
            found = importlib.import_module("flash_attn.cute").flash_attn_func
        except (ImportError, AttributeError) as missing:
            raise ValueError(f"{HOW_TO_GET_FLASH} ({missing})") from missing
        yield found


def _multiprocessors(count: int) -> AbstractContextManager[None]:
    """Patch the number of SMs that persistent kernels query from the DSL."""
    from cutlass.utils import HardwareInfo

    return patched(HardwareInfo, {"get_device_multiprocessor_count": lambda self: count})


def recorded(call: Callable[[], object], clusters: Any) -> list[Recording]:
    """Return the launches of the call that have machine code.

    clusters: clusters of each grid, an option of the emulator."""
    with watched(record=True, limit=None, clusters=clusters) as report:
        call()
    return [each.recording for each in report.launches if each.recording and each.recording.cubin]


def call_of(function: Callable[..., Any], shape: Shape, queries: int = 0) -> Callable[[], object]:
    """Return a call with random inputs; the entries of a batch are identical.

    queries: 0 for as many as keys."""
    import torch

    def drawn(heads: int, tokens: int = shape.seqlen) -> Any:
        one = torch.randn(1, tokens, heads, shape.head_dim, generator=generator).bfloat16()
        return one.repeat(shape.batch, 1, 1, 1)

    generator = torch.Generator().manual_seed(0)
    q = drawn(shape.heads, queries or shape.seqlen)
    k, v = (drawn(shape.kv_heads) for _ in range(2))
    return lambda: function(q, k, v, causal=shape.causal)


def spread(total: int, count: int) -> list[int]:
    """Choose `count` clusters of a grid, one from each of `count` equal parts, and the neighbour
    of the first. Their offsets differ: in a grid that orders its work in periods, equal
    distances would sample the same phase."""
    if count >= total:
        return list(range(total))
    bounds = [part * total // count for part in range(count + 1)]
    found = {
        low + int((high - low) * (part * _GOLDEN % 1))
        for part, (low, high) in enumerate(itertools.pairwise(bounds))
    }
    return sorted(found | {min(found) + 1})


# FROST, the attention of cuDNN's Python, where it is installed: a call on a machine without GPU.
#
# It asks tensors for their device, and its binder, which is no Python, looks at their memory by
# itself: the ones say that they are on a GPU, the other is told facts instead.


HOW_TO_GET_FROST = "FROST is not installed: `pip install nvidia-cudnn-frontend`"
_CUDA = torch.device("cuda", 0)
_DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]


class SaysCuda(TorchFunctionMode):
    """Tensors say that they are on the GPU, which some ask for by name."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function == _DEVICE:
            return _CUDA
        found = function(*args, **(kwargs or {}))
        return _CUDA if isinstance(found, torch.device) else found


@contextmanager
def frost() -> Iterator[Callable[..., Any]]:
    """Yield the forward pass of FROST for sm_100a. Raise ImportError, with how to get it, if it
    is not installed."""
    with machine_with_gpu(Emulator()):
        try:
            api = importlib.import_module("cudnn.sdpa.fwd.api_dsl")
            prepared = importlib.import_module("cudnn.sdpa.fwd.prepared")
            binder = importlib.import_module("cudnn")._pybind_module
        except (ImportError, AttributeError) as missing:
            raise ImportError(f"{HOW_TO_GET_FROST} ({missing})") from missing

        def told(spec: Any, buffers: Any, stream: Any, scale: Any, workspace: int = 0) -> Any:
            given = (*buffers, *[None] * (len(prepared._NATIVE_DENSE_ROLES) - len(buffers)))
            packed, _ = binder._read_buffer_sequence(given)
            for number, each in enumerate(given):
                if each is not None:
                    prepared._set_native_fact(packed, number, prepared.facts_of_tensor(each))
            indices = prepared._NATIVE_DENSE_INDICES
            return spec.native.execute(packed, indices, stream, scale, workspace)

        with SaysCuda(), patched(prepared, {"execute_native_dense_tensors": told}):
            yield api.sdpa_fwd_wrapper_dsl_sm100
