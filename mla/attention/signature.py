"""Example arguments of the host functions of all architectures: fake tensors, dynamic shapes."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint8

from kernelkit.device.fake import fake_tensor
from kernelkit.plan import hw
from mla.attention.config import Keys, LatentConfig
from mla.attention.formats import LATENT
from mla.attention.kernel_arguments import KernelArguments, Source, Tables


def example_arguments(config: LatentConfig) -> tuple[KernelArguments, CUstream]:
    """Return the arguments to compile the host functions with."""
    entries, tokens = cute.sym_int32(), cute.sym_int32()
    rows = (entries, tokens, config.heads)
    align = {"align": hw.TMA_ALIGN_BYTES}
    given = KernelArguments(
        q=fake_tensor(BFloat16, *rows, config.columns, **align),
        o=fake_tensor(BFloat16, *rows, LATENT, **align),
        lse=fake_tensor(Float32, *rows),
        keys=_source(config.keys, entries),
        extra=None if config.extra is None else _source(config.extra, entries),
        tables=_tables(config, entries),
        scale_log2=Float32(1.0),
        parts=Int32(1),
    )
    return given, CUstream(0)


def _source(keys: Keys, entries: Any) -> Source:
    form, slots = keys.form, cute.sym_int32()
    if form.plain:
        element = Float8E4M3FN if form.code else BFloat16
        store = fake_tensor(element, slots, keys.rows, form.columns, align=hw.TMA_ALIGN_BYTES)
    else:
        store = fake_tensor(Uint8, slots, cute.sym_int32(), align=hw.TMA_ALIGN_BYTES)
    return Source(
        store=store,
        places=fake_tensor(Int64 if keys.wide_index else Int32, entries, cute.sym_int32()),
        counts=fake_tensor(Int32, entries) if keys.counts else None,
        data_offset=Int32(0),
        scale_offset=Int32(0),
    )


def _tables(config: LatentConfig, entries: Any) -> Tables:
    def array(wanted: bool, dtype: type[cutlass.Numeric], *size: Any) -> Any:
        return fake_tensor(dtype, *size) if wanted else None

    units, turned = cute.sym_int32(), config.rope > 0
    angles = (cute.sym_int32(), config.rope // 2)
    return Tables(
        sinks=array(config.sinks, Float32, config.heads),
        cos=array(turned, Float32, *angles),
        sin=array(turned, Float32, *angles),
        positions=array(turned, Int64, entries),
        key_scale=array(config.key_scale, Float32, 1),
        partial=array(config.parts, Float32, units, cute.sym_int32(), cute.sym_int32()),
        counts=array(config.parts, Int32, units),
    )
