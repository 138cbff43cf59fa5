"""32-bit words in shared memory by address (device code)."""

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
def store(
    address: Int32, kind: cutlass.Constexpr, values: tuple[Float32 | Int32 | Uint32, ...]
) -> None:
    """One word or several; the address is a multiple of all their bytes."""
    vector, words = operands("r", 1, len(values))
    cute.arch.inline_ptx(
        f"st.shared{vector}.{TYPES[kind]} [{{$r0}}], {words};", read_only_args=[address, *values]
    )
