"""Parts of torch beside `torch.cuda` that need a GPU or leave the pretence, replaced.

torch runs the implementation of an operator, and the backward function of an autograd function,
without the function mode of its caller. They are run within one again here, so that they see the
GPU that their caller sees.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache
from importlib import import_module
from typing import Any

from ptxemu.host.marks import Marks, tensors_in
from ptxemu.host.patching import patched

Mode = Callable[[], AbstractContextManager[Any]]


@contextmanager
def operators_within(mode: Mode, marks: Marks) -> Iterator[None]:
    """While active, code that torch calls back runs within `mode()`."""
    import torch

    functions: Any = import_module("torch.autograd.function")
    custom_ops: Any = import_module("torch._library.custom_ops")
    devices: Any = import_module("torch.utils._device")
    from_dlpack = _from_dlpack(torch.utils.dlpack.from_dlpack, marks)
    with ExitStack() as stack:
        for owner, replacements in (
            (devices.DeviceContext, _default_device(devices.DeviceContext)),
            (torch.profiler, {"profile": _Profile}),
            (torch, {"compile": _compile, "Generator": _generator(torch.Generator)}),
            (torch.version, {"cuda": torch.version.cuda or "13.0"}),
            (torch, {"load": _load(torch.load, marks)}),
            (torch, {"from_dlpack": from_dlpack}),
            (torch.utils.dlpack, {"from_dlpack": from_dlpack}),
            (torch.library, {"custom_op": _custom_op(torch.library.custom_op, mode)}),
            (torch.library.Library, {"impl": _impl(torch.library.Library.impl, mode)}),
            (custom_ops.CustomOpDef, _kernels(custom_ops.CustomOpDef, mode)),
            (functions.BackwardCFunction, _backward(functions.BackwardCFunction, mode, marks)),
        ):
            stack.enter_context(patched(owner, replacements))
        yield


class _Profile:
    """Replacement for torch.profiler.profile, which records nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Any:
        return self

    def step(self, *_: Any, **__: Any) -> None:
        pass

    start = stop = __exit__ = step

    def key_averages(self, *_: Any, **__: Any) -> Any:
        util: Any = import_module("torch.autograd.profiler_util")
        return util.EventList()


# -- operators ------------------------------------------------------------------------------------


def _within(mode: Mode, function: Any) -> Any:
    @functools.wraps(function)
    def within(*args: Any, **kwargs: Any) -> Any:
        with mode():
            return function(*args, **kwargs)

    return within


def _custom_op(custom_op: Any, mode: Mode) -> Any:
    """torch.library.custom_op: the tensors of an operator for CUDA devices are on the CPU here."""

    def for_any_device(name: str, fn: Any = None, /, **how: Any) -> Any:
        def made(function: Any) -> Any:
            import torch

            own = {**how, "device_types": None}
            if own.get("schema") is None:  # of the function itself: it reads annotations there
                mutates = own["mutates_args"]
                own["schema"] = torch.library.infer_schema(function, mutates_args=mutates)
            return custom_op(name, _within(mode, function), **own)

        return made if fn is None else made(fn)

    return for_any_device


def _impl(impl: Any, mode: Mode) -> Any:
    """torch.library.Library.impl: what is for CUDA serves CPU tensors here, also instead of an
    implementation for the CPU."""
    ours: set[tuple[str, str]] = set()
    overriding = "allow_override" in inspect.signature(impl).parameters

    def for_cuda(self: Any, name: Any, fn: Any, key: str = "", **how: Any) -> Any:
        asked = key or self.dispatch_key
        operator = self.ns, str(name)
        of_torch = getattr(fn, "__module__", None) or ""
        if asked == "CUDA" and callable(fn) and of_torch.partition(".")[0] != "torch":
            ours.add(operator)
            with warnings.catch_warnings():  # of an implementation that is overridden
                warnings.simplefilter("ignore")
                if overriding:
                    how["allow_override"] = True
                return impl(self, name, _within(mode, fn), "CPU", **how)
        if asked == "CPU" and operator in ours:
            return None
        return impl(self, name, fn, key, **how)

    return for_cuda


def _kernels(owner: Any, mode: Mode) -> dict[str, Any]:
    """CustomOpDef.register_kernel: 'cuda' means the CPU here."""
    register = owner.register_kernel

    def register_kernel(self: Any, device_types: Any, fn: Any = None, /) -> Any:
        if device_types is None or "cuda" not in device_types:
            return register(self, device_types, fn)

        def made(function: Any) -> Any:
            return register(self, "cpu", _within(mode, function))

        return made if fn is None else made(fn)

    return {"register_kernel": register_kernel}


def _backward(owner: Any, mode: Mode, marks: Marks) -> dict[str, Any]:
    """BackwardCFunction.apply, which calls an autograd function's `backward`.

    The gradients that it gets were made by torch's engine, where nothing sees them.
    """
    apply = owner.apply

    def within(self: Any, *gradients: Any) -> Any:
        try:
            saved = self.saved_tensors
        except RuntimeError:  # they are freed: `apply` says so
            saved = ()
        if any(map(marks.holds, tensors_in(saved))):
            marks.add_tensors(gradients)
        with mode():
            return apply(self, *gradients)

    return {"apply": within}


def _default_device(owner: Any) -> dict[str, Any]:
    """DeviceContext, of `with torch.device` and torch.set_default_device, for a CUDA device.

    The first is above our mode, which it passes the device to. The second is below, where our mode
    has done all that there is to do.
    """
    own = owner.__torch_function__

    def on_cpu(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        overrides: Any = import_module("torch.overrides")
        below = overrides._get_current_function_mode_stack()
        if self.device.type == "cuda" and not any(hasattr(each, "pretends") for each in below):
            return func(*args, **(kwargs or {}))
        return own(self, func, types, args, kwargs)

    return {"__torch_function__": on_cpu}


# -- others ---------------------------------------------------------------------------------------


def _compile(model: Any = None, **_: Any) -> Any:
    """torch.compile: the function itself, since there is no CUDA for its backend to compile for."""
    _say_that_nothing_is_compiled()
    return model if model is not None else lambda function: function


@lru_cache(maxsize=1)
def _say_that_nothing_is_compiled() -> None:
    print("ptxemu: torch.compile leaves functions as they are here", file=sys.stderr)


def _generator(real: Any) -> Any:
    """torch.Generator: one for CUDA is the CPU's."""

    class Asked(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, real)

        def __call__(cls, device: Any = "cpu") -> Any:
            return real("cpu" if str(device).startswith("cuda") else device)

    class Generator(metaclass=Asked):
        pass

    return Generator


def _load(load: Any, marks: Marks) -> Any:
    """torch.load: what is to come to the GPU comes to the CPU and is marked."""

    def to_device(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        on_gpu = str(map_location).startswith("cuda")
        loaded = load(file, "cpu" if on_gpu else map_location, *args, **kwargs)
        if on_gpu:
            marks.add_tensors(loaded)
        return loaded

    return functools.wraps(load)(to_device)


def _from_dlpack(from_dlpack: Any, marks: Marks) -> Any:
    """torch.from_dlpack: a tensor on the GPU stays there; DLPack itself says CPU."""

    def marked(source: Any, *args: Any, **kwargs: Any) -> Any:
        made = from_dlpack(source, *args, **kwargs)
        if any(map(marks.holds, tensors_in(source))):
            marks.add_tensors(made)
        return made

    return functools.wraps(from_dlpack)(marked)
