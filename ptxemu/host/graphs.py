"""CUDA graphs of torch: work is recorded while it is captured, and done at each replay.

While a capture is active, a launch is only recorded: nothing runs. A call of torch has to run,
since it makes tensors that later calls use; what it writes to existing memory is undone. A replay
does the recorded work in order, with the addresses of the capture. It calls torch again and writes
results into the tensors of the capture, so static inputs and outputs behave as on a GPU. Work that
is neither a launch nor a call of torch's Python interface, such as a copy by ctypes or numpy, is
not captured. As on a GPU, Python values do not change at a replay.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from ptxemu.host.marks import storage_of, tensors_in

Work = Callable[[], Any]
_FORBIDDEN = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy"}

_capture: ContextVar[Capture | None] = ContextVar("capture", default=None)


def capturing() -> Capture | None:
    """Return the capture of this context, or None if there is none."""
    return _capture.get()


class Capture:
    """Work that a graph does at a replay, in order; it keeps every tensor that it knows alive."""

    def __init__(self) -> None:
        self._work: list[Work] = []

    def add(self, work: Work) -> None:
        """Record work, such as a launch, which is not done now."""
        self._work.append(work)

    def call(
        self,
        run: Callable[..., Any],
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Record a call of torch, made by `run(function, args, kwargs)`; its result as of now.

        Raises RuntimeError for a call that waits for the device, as a GPU does.
        """
        name = getattr(function, "__name__", "")
        if name in _FORBIDDEN:
            raise RuntimeError(
                f"{name}() while a graph is captured: operation not permitted when stream is "
                "capturing (cudaErrorStreamCaptureUnsupported)"
            )
        before = [(tensor, tensor._version, tensor.detach().clone())
                  for tensor in tensors_in([*args, *kwargs.values()])
                  if storage_of(tensor) is not None]  # fmt: skip
        result = run(function, args, kwargs)
        written = [(tensor, old) for tensor, version, old in before if tensor._version != version]
        for tensor, old in written:
            tensor.detach().copy_(old)

        def again() -> None:
            import torch

            with torch.no_grad():
                _overwrite(result, run(function, args, kwargs))

        self._work.append(again)
        return result

    def replay(self) -> None:
        """Do all recorded work."""
        for work in self._work:
            work()


def _overwrite(result: Any, new: Any) -> None:
    """Copy new tensors into those of the capture, unless they are the same memory."""
    for old, fresh in zip(tensors_in(result), tensors_in(new), strict=True):
        into, source = storage_of(old), storage_of(fresh)
        if into is not None and source is not None and into._cdata != source._cdata:
            old.detach().copy_(fresh)


class Graph:
    """torch.cuda.CUDAGraph, see the module."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._capture: Capture | None = None
        self._token: Any = None

    def capture_begin(self, *_: Any, **__: Any) -> None:
        if capturing() is not None:
            raise RuntimeError("a graph is being captured already")
        self._capture = Capture()
        self._token = _capture.set(self._capture)

    def capture_end(self) -> None:
        if self._token is None:
            raise RuntimeError("capture_end without capture_begin")
        _capture.reset(self._token)
        self._token = None

    def replay(self) -> None:
        """Do the captured work; RuntimeError where nothing was captured."""
        if self._capture is None or self._token is not None:
            raise RuntimeError("replay of a graph without a finished capture")
        self._capture.replay()

    def reset(self) -> None:
        self._capture = None

    def pool(self) -> tuple[int, int]:
        return 0, 0

    def instantiate(self) -> None:
        """There is nothing to prepare."""

    def enable_debug_mode(self) -> None:
        """There is nothing to print."""


class graph:
    """torch.cuda.graph: a context that captures."""

    default_capture_stream = None

    def __init__(self, cuda_graph: Graph, *_: Any, **__: Any) -> None:
        self._graph = cuda_graph

    def __enter__(self) -> None:
        self._graph.capture_begin()

    def __exit__(self, *_: Any) -> None:
        self._graph.capture_end()
