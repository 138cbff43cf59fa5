"""`warmup`: the kernels of a cache of some layout, compiled before its first step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from kernelkit.call.launch import choose_target
from kernelkit.call.tensors import DTYPE_NAMES, device_of, require_dtypes
from kernelkit.compile.compiler import collecting
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.warm import Progress, Warmed, warm
from kvcache.checks import require
from kvcache.layouts.latent import LATENTS
from kvcache.layouts.layout import Layout, Ring, Stream
from kvcache.movement.arguments import LATENT_DTYPES
from kvcache.movement.config import (
    AppendConfig,
    ChecksumConfig,
    CopyConfig,
    DequantiseConfig,
    RowsConfig,
    lanes_of,
    vector_of,
)
from kvcache.movement.launch import ARCHS, Config, compile_kernel


def warmup(
    layout: Layout,
    *,
    dtypes: Collection[torch.dtype] = (torch.bfloat16,),
    device: torch.device | str = "cuda",
    backend: str = "auto",
    arch: str | None = None,
    progress: Progress | bool | None = None,
) -> Warmed:
    """Find or compile the kernels with which a cache of `layout` is written, read and moved.

    Those of `append_swa`, `append_rows`, `gather`, `copy_slots` and `checksum`, whatever the number
    of tokens; tensors of tokens begin at multiples of 16 bytes.

    Args:
        dtypes: of what `append_swa` takes.
        device: of the cache; 'meta' with `arch` needs no GPU.
        progress: see `kernelkit.compile.warm.warm`, as for what is returned.

    Raises:
        NotImplementedError, ValueError: for a place where no kernel runs.
    """
    require("layout", layout, Layout)
    target = choose_target(device_of(device), backend, arch, ARCHS)
    require_dtypes(dtypes, LATENT_DTYPES)
    names = [DTYPE_NAMES[dtype] for dtype in dtypes]
    return warm(kernels_for(layout, names, target.arch), progress)


def kernels_for(layout: Layout, dtypes: Sequence[str], arch: str) -> list[KernelKey]:
    """The kernels of `warmup`, each once; dtypes by name."""
    with collecting() as keys:
        for config in dict.fromkeys(_configs(layout, dtypes)):
            compile_kernel(config, arch)
    return keys


def _configs(layout: Layout, dtypes: Sequence[str]) -> Iterator[Config]:
    """Yield the configs of these kernels, some of them more than once."""
    yield from (CopyConfig(segmented=False), CopyConfig(segmented=True), ChecksumConfig())
    for array in (*layout.streams, *layout.rings):
        record = array.record
        latent = LATENTS.get(record.name)
        if latent:
            yield from (AppendConfig(record.name, dtype) for dtype in dtypes)
        if latent and latent.group:
            yield DequantiseConfig(record.name)
        if not record.scale_bytes:
            yield from _rows_configs(layout, array)


def _rows_configs(layout: Layout, array: Stream | Ring) -> Iterator[RowsConfig]:
    """Rows as they are, of one array or, as keys and values, of two that are alike."""
    slot_bytes = layout.block_bytes if isinstance(array, Stream) else layout.state_bytes
    for copy in range(array.copies):
        place = layout.place(array.name, copy)
        nbytes = array.record.data_bytes
        vector = vector_of(place.data_offset, nbytes, slot_bytes)
        lanes = lanes_of(nbytes, vector)
        yield RowsConfig(vector, lanes, gathered=True)
        for pairs in (1, 2):
            yield RowsConfig(vector, lanes, pairs)
