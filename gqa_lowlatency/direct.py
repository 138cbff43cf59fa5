"""`DecodePlan`: a problem that is checked, compiled and described once, and launched many times."""

from __future__ import annotations

import torch

from gqa_lowlatency.arguments import Arguments
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
from kernelkit.launch import PreparedLaunch


class DecodePlan:
    """A decode step whose sizes do not change; `gqa_lowlatency.decode_plan` makes it.

    config: what was compiled. Calls go past torch's dispatcher, and the only checks left are that
    every tensor has the shape, strides, dtype and device of the one it was planned with, and a
    16-byte address. What lengths and page numbers say is not looked at, on the CPU neither. One
    thread at a time; the launch goes to the current stream; CUDA graphs capture it.
    """

    def __init__(self, arguments: Arguments) -> None:
        target, self.config = prepare(arguments)
        for name in ("seq_lens", "page_table"):
            table = getattr(arguments, name)
            if table is not None and 0 in table.stride() and table.numel() > 1:
                raise ValueError(f"{name} has strides {table.stride()}: a plan reads it in place")
        self._arguments = arguments
        self._launch = None
        results = empty_results(arguments)
        if has_keys(arguments):
            compiled = compile_for(self.config, target.arch)
            given = kernel_arguments(arguments, results, self.config, target)
            self._launch = PreparedLaunch(compiled, given, target, arguments.q.device)
            # Sinks and scales stay where they are: what the launch holds of them keeps them alive.
            self._fixed = [t.data_ptr() for t in (given[1] or ())[2:] if t is not None]
            self._kept = given
        moving = (arguments.q, arguments.k, arguments.v, *results)
        tables = (arguments.seq_lens, arguments.page_table)
        self._layouts = [_layout(t) for t in (*moving, *(t for t in tables if t is not None))]
        self._names = ["q", "k", "v", "out", "lse"]
        self._names += [n for n in ("seq_lens", "page_table") if getattr(arguments, n) is not None]

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
            made = empty_results(self._arguments)
            out, lse = made[0] if out is None else out, made[1] if lse is None else lse
        tensors = [q, k, v, out, lse]
        if seq_lens is not None:
            tensors.append(seq_lens)
        if page_table is not None:
            tensors.append(page_table)
        if [(t.shape, t.stride(), t.dtype, t.device) for t in tensors] != self._layouts:
            self._refuse(tensors)
        if self._launch is None:
            return without_keys(self._arguments, (out, lse))
        addresses = [tensor.data_ptr() for tensor in tensors]
        if (addresses[0] | addresses[1] | addresses[2] | addresses[3]) % hw.TMA_ALIGN_BYTES:
            raise ValueError(f"q, k, v and out at {addresses[:4]}: multiples of 16 bytes")
        self._launch(addresses + self._fixed)
        return out, lse

    def _refuse(self, tensors: list[torch.Tensor]) -> None:
        if len(tensors) != len(self._names):
            raise ValueError(f"{len(tensors)} tensors, planned with {', '.join(self._names)}")
        for name, tensor, planned in zip(self._names, tensors, self._layouts, strict=True):
            if _layout(tensor) != planned:
                raise ValueError(f"{name} is {_layout(tensor)}, planned was {planned}")


def _layout(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
