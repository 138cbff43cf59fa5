"""Words in shared memory by address (device code)."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32


@cute.jit
def load_float(address: Int32) -> Float32:
    """ld.shared."""
    return cute.arch.inline_ptx(
        "ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address]
    )


@cute.jit
def load_floats(address: Int32) -> tuple[Float32, ...]:
    """Four of them."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[address],
    )


@cute.jit
def store_float(address: Int32, value: Float32) -> None:
    """st.shared."""
    cute.arch.inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[address, value])


@cute.jit
def load_integer(address: Int32) -> Int32:
    """ld.shared."""
    return cute.arch.inline_ptx(
        "ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address]
    )


@cute.jit
def store_integer(address: Int32, value: Int32) -> None:
    """st.shared."""
    cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, value])


@cute.jit
def store_floats(address: Int32, values: tuple[Float32, ...]) -> None:
    """Four of them."""
    cute.arch.inline_ptx(
        "st.shared.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *values],
    )


@cute.jit
def load_pair(address: Int32) -> tuple[Uint32, Uint32]:
    """Two words, as they are."""
    return cute.arch.inline_ptx(
        "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Uint32] * 2,
        read_only_args=[address],
    )


@cute.jit
def store_pair(address: Int32, words: tuple[Uint32, Uint32]) -> None:
    """Two words, as they are."""
    cute.arch.inline_ptx(
        "st.shared.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, *words]
    )
