"""32-bit words in shared memory by address (device code)."""

import struct

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

TYPES = {Float32: "f32", Int32: "b32", Uint32: "b32"}


def operands(letter: str, first: int, count: int) -> tuple[str, str]:
    """(suffix, operands of PTX) of so many words side by side."""
    names = ", ".join(f"{{${letter}{first + k}}}" for k in range(count))
    return (f".v{count}", f"{{{names}}}") if count > 1 else ("", names)


@cute.jit
def load(
    address: Int32, kind: cutlass.Constexpr, count: cutlass.Constexpr = 1
) -> Float32 | Int32 | Uint32 | tuple[Float32 | Int32 | Uint32, ...]:
    """A word, or `count` of them as a tuple; the address is a multiple of all their bytes."""
    vector, words = operands("w", 0, count)
    return cute.arch.inline_ptx(
        f"ld.shared{vector}.{TYPES[kind]} {words}, [{{$r0}}];",
        write_only_types=[kind] * count,
        read_only_args=[address],
    )


@cute.jit
def load_below(
    address: Int32,
    index: cutlass.Constexpr,
    bound: Int32,
    otherwise: cutlass.Constexpr,
) -> tuple[Float32, ...]:
    """Two or four fp32 where index < bound, else those of `otherwise`.

    A predicate instead of a branch: many of these are in flight at a time.
    """
    count = len(otherwise)
    names = [f"t{k}" for k in range(count)]
    begin = " ".join(
        f"mov.f32 {name}, 0f{struct.pack('>f', value).hex().upper()};"
        for name, value in zip(names, otherwise, strict=True)
    )
    end = " ".join(f"mov.f32 {{$w{k}}}, {name};" for k, name in enumerate(names))
    return cute.arch.inline_ptx(
        f"{{ .reg .pred below; .reg .f32 {', '.join(names)}; {begin} "
        f"setp.gt.s32 below, {{$r1}}, {index}; "
        f"@below ld.shared.v{count}.f32 {{{', '.join(names)}}}, [{{$r0}}]; {end} }}",
        write_only_types=[Float32] * count,
        read_only_args=[address, bound],
    )


@cute.jit
def store(
    address: Int32, kind: cutlass.Constexpr, values: tuple[Float32 | Int32 | Uint32, ...]
) -> None:
    """Store one or several words; the address is a multiple of all their bytes."""
    vector, words = operands("r", 1, len(values))
    cute.arch.inline_ptx(
        f"st.shared{vector}.{TYPES[kind]} [{{$r0}}], {words};", read_only_args=[address, *values]
    )
