"""What a kernel launch says: the CUDA runtime's launch structure decoded into a `LaunchRequest`."""

from __future__ import annotations

import ctypes
import re
import struct
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

from ptxemu.errors import HardwareRefusal
from ptxemu.machine.gpu_limits import cluster_refusal, limits_of

Dim3 = tuple[int, int, int]

# cudaLaunchConfig_t: grid, block, dynamic shared memory, stream, attributes, number of attributes.
_CONFIG = struct.Struct("<3I3IQQQI")
# cudaLaunchAttribute: the id, padding to 8, then a union of 64 bytes.
_ATTRIBUTE = struct.Struct("<I4x64s")

# cudaLaunchAttributeID, those that change how a kernel runs.
_COOPERATIVE = 2
_CLUSTER = 4
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_PREFERRED_CLUSTER = 11

# cudaFuncAttribute, those that a launch needs.
_MAX_DYNAMIC_SHARED_MEMORY = 8
_NON_PORTABLE_CLUSTER = 14

_SHARED_MEMORY = 48 * 1024  # bytes of dynamic shared memory that a kernel may have unasked
_PORTABLE_CLUSTER = 8  # CTAs

_ENTRY = re.compile(r"\.entry\s+([\w$%]+)\s*\(([^)]*)\)")
_PARAMETER = re.compile(r"\.param\b.*?\.[bsuf](\d+)\b.*?(?:\[(\d+)\])?\s*$", re.DOTALL)


@dataclass(frozen=True)
class LaunchAttributes:
    """Launch attributes; `other` keeps the 64 raw bytes of those not decoded, by their id."""

    cooperative: bool = False
    pdl: bool = False  # programmatic stream serialization
    cluster: Dim3 = (1, 1, 1)
    preferred_cluster: Dim3 | None = None
    other: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class LaunchConfig:
    """A cudaLaunchConfig_t by value: sizes in CTAs and threads, shared memory in bytes."""

    grid: Dim3
    block: Dim3
    smem_bytes: int
    stream: int
    attributes: LaunchAttributes


@dataclass(frozen=True)
class LaunchRequest:
    """One kernel launch as the host code asked for it.

    `params` holds the raw little-endian bytes of each kernel parameter in order, copied at launch;
    pointers in them are host addresses and a tensor map is its 128 bytes. `image`: the address of
    the machine code that the host code has loaded, see `device_code`.
    """

    ptx: str
    entry: str
    grid: Dim3
    block: Dim3
    cluster: Dim3
    smem_bytes: int
    params: tuple[bytes, ...]
    attributes: LaunchAttributes
    image: int = 0


def read_config(address: int) -> LaunchConfig:
    """Decode the cudaLaunchConfig_t at a host address."""
    values = _CONFIG.unpack(ctypes.string_at(address, _CONFIG.size))
    smem_bytes, stream, first, count = values[6:]
    raw = {}
    for index in range(count):
        identifier, value = _ATTRIBUTE.unpack(
            ctypes.string_at(first + index * _ATTRIBUTE.size, _ATTRIBUTE.size)
        )
        raw[identifier] = value
    return LaunchConfig(values[0:3], values[3:6], smem_bytes, stream, _attributes(raw))


def require_settable(attribute: int, value: int, target: str = "") -> None:
    """Refuse what cudaFuncSetAttribute does: more shared memory than a CTA can have on a GPU of the
    module's `.target` (CUDA Runtime API, cudaFuncAttributeMaxDynamicSharedMemorySize)."""
    most = limits_of(target).smem_of_cta
    if attribute == _MAX_DYNAMIC_SHARED_MEMORY and not 0 <= value <= most:
        of_target = f" of .target {target}" * bool(target)
        raise HardwareRefusal(
            f"cudaFuncAttributeMaxDynamicSharedMemorySize of {value} bytes; at most"
            f" {most}{of_target}"
        )


def require_allowed(config: LaunchConfig, attributes: dict[int, int], target: str = "") -> None:
    """Refuse a launch that a GPU refuses unless the host has allowed it for the kernel, and
    clusters where there are none.

    Sources: CUDA C++ Programming Guide, "Shared Memory" of compute capability 10.0 (more than 48 KB
    by an explicit opt-in, as dynamic shared memory), and "Thread Block Clusters" (8 CTAs are
    portable; more need cudaFuncAttributeNonPortableClusterSizeAllowed).

    Args:
        config: the launch.
        attributes: what was set for its kernel, by cudaFuncAttribute.
        target: of its module, such as 'sm_89'.

    Raises:
        HardwareRefusal: with the value, the limit, and the attribute that is missing.
    """
    allowed = attributes.get(_MAX_DYNAMIC_SHARED_MEMORY, _SHARED_MEMORY)
    if config.smem_bytes > allowed:
        raise HardwareRefusal(
            f"a launch with {config.smem_bytes} bytes of dynamic shared memory, of which the kernel"
            f" may have {allowed}; the host has to set"
            " cudaFuncAttributeMaxDynamicSharedMemorySize"
        )
    ctas = prod(config.attributes.cluster)
    refusal = cluster_refusal(ctas, target)
    if refusal:
        raise HardwareRefusal(refusal)
    if ctas > _PORTABLE_CLUSTER and not attributes.get(_NON_PORTABLE_CLUSTER):
        raise HardwareRefusal(
            f"a launch with clusters of {ctas} CTAs, of which {_PORTABLE_CLUSTER} are portable; the"
            " host has to set cudaFuncAttributeNonPortableClusterSizeAllowed"
        )


def _attributes(raw: dict[int, bytes]) -> LaunchAttributes:
    """Only the first four bytes of a flag are written by the host code; the rest is stale stack."""

    def flag(identifier: int) -> bool:
        return identifier in raw and struct.unpack_from("<i", raw.pop(identifier))[0] != 0

    def dim(identifier: int) -> Dim3 | None:
        return struct.unpack_from("<3I", raw.pop(identifier)) if identifier in raw else None

    return LaunchAttributes(
        cooperative=flag(_COOPERATIVE),
        pdl=flag(_PROGRAMMATIC_STREAM_SERIALIZATION),
        cluster=dim(_CLUSTER) or (1, 1, 1),
        preferred_cluster=dim(_PREFERRED_CLUSTER),
        other=raw,
    )


@lru_cache(maxsize=64)
def parameter_sizes(ptx: str) -> dict[str, tuple[int, ...]]:
    """Bytes of every `.param` of every `.entry` of a PTX module, in order.

    Raises ValueError for a parameter declaration that is not understood.
    """
    return {
        name: tuple(map(_size, parameters.split(","))) if parameters.strip() else ()
        for name, parameters in _ENTRY.findall(ptx)
    }


def _size(declaration: str) -> int:
    """128 for `.param .align 64 .b8 name[128]`, 8 for `.param .u64 .ptr .global .align 16 name`."""
    match = _PARAMETER.search(declaration)
    if match is None:
        raise ValueError(f"not a kernel parameter: {declaration.strip()!r}")
    bits, count = match.groups()
    return int(bits) // 8 * int(count or 1)


def read_params(address: int, sizes: tuple[int, ...]) -> tuple[bytes, ...]:
    """Copy the parameters that the array of pointers at `address` points to."""
    pointers = (ctypes.c_uint64 * len(sizes)).from_address(address) if sizes else ()
    return tuple(ctypes.string_at(p, size) for p, size in zip(pointers, sizes, strict=True))
