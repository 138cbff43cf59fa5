"""`Step` and `DecodePlan`: a problem that is checked, compiled and described once, and launched
many times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter

import torch

# What torch's own compiled graphs compare and allocate tensors with: a quarter of the time that
# reading shapes and strides into Python objects takes, and of torch.empty_strided. Private, there
# is nothing public like them.
from torch._C._dynamo.guards import TensorGuards, _empty_strided_cuda

from gqa_lowlatency.arguments import TABLES, Arguments
from gqa_lowlatency.config import DecodeConfig
from gqa_lowlatency.forward import (
    Results,
    compile_for,
    empty_results,
    has_keys,
    kernel_arguments,
    prepare,
    without_keys,
)
from kernelkit import hw
from kernelkit.launch import PreparedLaunch, Target

# All tensors at once, by functions in C: half the time of a loop over tensors and attributes.
_kind = attrgetter("shape", "dtype", "device")
_strides = torch.Tensor.stride
_address = torch.Tensor.data_ptr


def layouts(tensors: Sequence[torch.Tensor]) -> tuple:
    """What a launch depends on besides addresses, to be compared and hashed."""
    return tuple(map(_kind, tensors)), tuple(map(_strides, tensors))


def _guards(tensors: Sequence[torch.Tensor]) -> TensorGuards:
    """check(*tensors) is true for tensors of these layouts; it may be false for them as well,
    since it also looks at what autograd and inference mode make of a tensor."""
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def _maker(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Allocates one like `tensor`; on the current device, if that is a GPU."""
    layout = tuple(tensor.shape), tensor.stride()
    if tensor.device.type == "cuda":
        return partial(_empty_strided_cuda, *layout, tensor.dtype)
    return partial(torch.empty_strided, *layout, dtype=tensor.dtype, device=tensor.device)


# What the kernel reads or writes besides tensors of the user, and how it begins.
_OWN = {"partial": torch.empty, "counts": torch.zeros}


class Step:
    """A problem with keys, checked and described: what is left of a call is addresses and a launch.

    It keeps no tensor, neither those of the arguments, which may be most of the GPU's memory, nor
    any of its own: what is allocated while torch captures or warms up belongs to a graph. One
    thread at a time.
    """

    def __init__(self, arguments: Arguments, target: Target, config: DecodeConfig) -> None:
        results, device = empty_results(arguments), arguments.q.device
        given = kernel_arguments(arguments, results, config, target)
        tables = dict(zip((*TABLES, "partial", "counts"), given[1] or (), strict=False))
        users = arguments.present_tables()
        own = {n: t for n, t in tables.items() if t is not None and n not in users}
        self._own = [
            partial(_OWN[name], table.shape, dtype=table.dtype, device=device)
            for name, table in own.items()
        ]
        self._device = device
        self._results = [_maker(tensor) for tensor in results]
        # The kernel cannot read a broadcast, nor one number for all heads: each launch copies them.
        self._copies = [
            (place, tables[name].shape)
            for place, (name, table) in enumerate(users.items(), len(given[0]))
            if tables[name].data_ptr() != table.data_ptr()
        ]
        compiled = compile_for(config, target.arch)
        self._prepared = PreparedLaunch(compiled, given, target, device, last=list(own.values()))
        self._addresses: list[int] = []

    def results(self) -> Results:
        """O and LSE, allocated and not yet written."""
        make_o, make_lse = self._results
        if self._device.type == "cuda" and torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device):
                return make_o(), make_lse()
        return make_o(), make_lse()

    def own(self) -> list[torch.Tensor]:
        """Workspace, which launches that follow each other on a stream may share."""
        return [make() for make in self._own]

    def launch(self, tensors: Sequence[torch.Tensor]) -> None:
        """tensors: q, k, v, O, LSE and the tables in order, laid out as those of the arguments, and
        what `own` made.

        ValueError for an address that a kernel cannot take; nothing else is checked.
        """
        for place, shape in self._copies:
            tensors = list(tensors)
            tensors[place] = tensors[place].expand(shape).contiguous()
        addresses = list(map(_address, tensors))
        if addresses != self._addresses:  # often they are those of the call before
            self._move(addresses)
        self._prepared.launch()

    def _move(self, addresses: list[int]) -> None:
        q, k, v, o = addresses[:4]
        if (q | k | v | o) % hw.TMA_ALIGN_BYTES:
            raise ValueError(f"q, k, v and out at {addresses[:4]}: multiples of 16 bytes")
        self._prepared.move(addresses)
        self._addresses = addresses


class DecodePlan:
    """A decode step whose sizes do not change; `gqa_lowlatency.decode_plan` makes it.

    config: what was compiled. Calls go past torch's dispatcher, and the only checks left are that
    every tensor has the shape, strides, dtype and device of the one it was planned with, and a
    16-byte address. What lengths and page numbers say is not looked at, on the CPU neither. One
    thread and one stream at a time; launches go to the current stream; CUDA graphs capture them.
    """

    def __init__(self, arguments: Arguments) -> None:
        target, self.config = prepare(arguments)
        planned = has_keys(arguments)
        self._step = Step(arguments, target, self.config) if planned else None
        self._empty = None if planned else arguments
        tables = arguments.present_tables()
        moving = {name: tables.pop(name) for name in ("seq_lens", "page_table") if name in tables}
        self._held = [*tables.values(), *(self._step.own() if planned else ())]
        self._names = ["q", "k", "v", "out", "lse", *moving]
        inputs = arguments.q, arguments.k, arguments.v
        tensors = [*inputs, *empty_results(arguments), *moving.values()]
        self._layouts, self._guards = layouts(tensors), _guards(tensors)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        seq_lens: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> Results:
        """(O, LSE) of these tensors, written to out and lse, or to new ones where they are None.

        seq_lens and page_table are given where the plan was made with them. ValueError for a
        tensor that is laid out differently.
        """
        if out is None or lse is None:
            made = empty_results(self._empty) if self._step is None else self._step.results()
            out, lse = made[0] if out is None else out, made[1] if lse is None else lse
        tensors = [q, k, v, out, lse]
        if seq_lens is not None:
            tensors.append(seq_lens)
        if page_table is not None:
            tensors.append(page_table)
        if len(tensors) != len(self._names) or not self._guards.check(*tensors):
            self._compare(tensors)
        if self._step is None:
            return without_keys(self._empty, (out, lse))
        self._step.launch(tensors + self._held)
        return out, lse

    def _compare(self, tensors: list[torch.Tensor]) -> None:
        """Refuse tensors of other layouts, and know the next ones like these sooner."""
        if len(tensors) != len(self._names):
            raise ValueError(f"{len(tensors)} tensors, planned with {', '.join(self._names)}")
        each = zip(self._names, *layouts(tensors), *self._layouts, strict=True)
        for name, kind, strides, *planned in each:
            if [kind, strides] != planned:
                raise ValueError(f"{name} is {kind} {strides}, planned was {planned}")
        self._guards = _guards(tensors)
