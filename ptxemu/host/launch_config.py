"""Decode the CUDA runtime's launch structure into a `LaunchRequest`."""

from __future__ import annotations

import ctypes
import re
import struct
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

from ptxemu.errors import HardwareRefusal
from ptxemu.machine.shape import cluster_refusal, limits_of

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
_PORTABLE_MODE = 17  # 0: as the attribute of the kernel has it, 1: portable, 2: not

# cudaFuncAttribute, those that a launch needs.
_MAX_DYNAMIC_SHARED_MEMORY = 8
_REQUIRED_CLUSTER = (11, 12, 13)  # width, height, depth
_NON_PORTABLE_CLUSTER = 14

_SHARED_MEMORY = 48 * 1024  # bytes of dynamic shared memory that a kernel may have unasked

_ENTRY = re.compile(r"\.entry\s+([\w$%]+)\s*\(([^)]*)\)")
_PARAMETER = re.compile(r"\.param\b.*?\.[bsuf](\d+)\b.*?(?:\[(\d+)\])?\s*$", re.DOTALL)


@dataclass(frozen=True)
class LaunchAttributes:
    """Launch attributes; `other` keeps the 64 raw bytes of those not decoded, by their id."""

    cooperative: bool = False
    pdl: bool = False  # programmatic stream serialization
    cluster: Dim3 | None = None  # None: the launch names none
    preferred_cluster: Dim3 | None = None
    portable_mode: int = 0
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
    """A kernel launch as the host code requested it.

    Attributes:
        cluster: None if the host sets none.
        params: Raw little-endian bytes of each kernel parameter in order, copied at launch.
            Pointers are host addresses; a tensor map is its 128 bytes.
        image: Address of the machine code that the host code loaded, see `device_code`.
        non_portable: Whether the host allows clusters of more than 8 CTAs.
    """

    ptx: str
    entry: str
    grid: Dim3
    block: Dim3
    cluster: Dim3 | None
    smem_bytes: int
    params: tuple[bytes, ...]
    attributes: LaunchAttributes
    image: int = 0
    non_portable: bool = False


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
            f"a launch with {config.smem_bytes} bytes of dynamic shared memory; the kernel may have"
            f" {allowed}, unless the host sets cudaFuncAttributeMaxDynamicSharedMemorySize"
        )
    cluster = cluster_wished(config, attributes)
    refusal = cluster_refusal(prod(cluster or ()), target, may_be_large(config, attributes))
    if refusal:
        raise HardwareRefusal(refusal)


def cluster_wished(config: LaunchConfig, attributes: dict[int, int]) -> Dim3 | None:
    """Return the cluster that the host names: for this launch, or for the kernel (CUDA Runtime API,
    cudaFuncAttributeRequiredClusterWidth and its like); None for none.

    Raises HardwareRefusal where the two differ.
    """
    x, y, z = (attributes.get(attribute, 0) for attribute in _REQUIRED_CLUSTER)
    given, required = config.attributes.cluster, (x, y, z) if x or y or z else None
    if required and given not in (None, required):
        raise HardwareRefusal(
            f"cluster={given}; the host has set cudaFuncAttributeRequiredClusterWidth, Height and "
            f"Depth of the kernel to {required}"
        )
    return given or required


def may_be_large(config: LaunchConfig, attributes: dict[int, int]) -> bool:
    """Return whether the host has allowed clusters that are not portable."""
    mode = config.attributes.portable_mode
    return mode == 2 or (not mode and bool(attributes.get(_NON_PORTABLE_CLUSTER)))


def _attributes(raw: dict[int, bytes]) -> LaunchAttributes:
    """Decode attributes; a flag has four valid bytes, the rest of its field is stale stack."""

    def number(identifier: int) -> int:
        return struct.unpack_from("<i", raw.pop(identifier))[0] if identifier in raw else 0

    def flag(identifier: int) -> bool:
        return number(identifier) != 0

    def dim(identifier: int) -> Dim3 | None:
        return struct.unpack_from("<3I", raw.pop(identifier)) if identifier in raw else None

    return LaunchAttributes(
        cooperative=flag(_COOPERATIVE),
        pdl=flag(_PROGRAMMATIC_STREAM_SERIALIZATION),
        cluster=dim(_CLUSTER),
        preferred_cluster=dim(_PREFERRED_CLUSTER),
        portable_mode=number(_PORTABLE_MODE),
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


def requested(
    kernel: tuple[str, str],
    config: LaunchConfig,
    attributes: dict[int, int],
    params: int,
    *,
    target: str,
    image: int = 0,
) -> LaunchRequest:
    """Return the launch that a host requests.

    Args:
        kernel: PTX of the module, and the name of the entry.
        config: grid, blocks and attributes of the launch.
        attributes: those that the host has set for the kernel.
        params: address of the array of pointers to the parameters.
        target: `.target` of the module.
        image: see `LaunchRequest`.

    Raises HardwareRefusal for a launch that a GPU refuses.
    """
    require_allowed(config, attributes, target)
    ptx, entry = kernel
    return LaunchRequest(
        ptx=ptx,
        entry=entry,
        grid=config.grid,
        block=config.block,
        cluster=cluster_wished(config, attributes),
        smem_bytes=config.smem_bytes,
        params=read_params(params, parameter_sizes(ptx)[entry]),
        attributes=config.attributes,
        image=image,
        non_portable=may_be_large(config, attributes),
    )
