"""Loads and stores: every type, vector, register width, space and cache operator; address forms."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.conformance.case import Case
from workbench.conformance.kernel import EVICT_FIRST, INPUTS, THREADS, case, output, random_buffer
from workbench.conformance.patterns import expand

_SLOT = 32  # bytes of a thread
_TYPES = "b8 u8 s8 b16 u16 s16 b32 u32 s32 f32 b64 u64 s64 f64"
_VECTORS = {"": 1, ".v2": 2, ".v4": 4}
_SCOPES = "{cta|cluster|gpu|sys}"

# qualifiers of a load in front of its space, and what stands behind it
_LOADS = (
    *(f".{x}" for x in ("weak", "volatile", "ca", "cg", "cs", "lu", "cv")),
    *expand(f".{{relaxed|acquire}}.{_SCOPES}"),
    ".mmio.relaxed.sys",
)
_GLOBAL_LOADS = (
    *expand(".global{|.nc}.L1::no_allocate.L2::128B"),
    *expand(".global{|.ca|.cg|.cs}.nc"),
    *expand(".global.L1::{evict_first|evict_last|evict_normal|evict_unchanged|no_allocate}"),
    *expand(".global.nc.L1::{evict_first|evict_last|evict_normal|evict_unchanged|no_allocate}"),
    *expand(".global{|.nc}.L2::{64B|128B|256B}"),
    *expand(".global{|.nc}.L1::{evict_last|no_allocate}.L2::cache_hint"),
    ".global{|.nc}.L2::cache_hint",
)
_STORES = (
    *(f".{x}" for x in ("weak", "volatile", "wb", "cg", "cs", "wt")),
    *expand(f".{{relaxed|release}}.{_SCOPES}"),
    ".mmio.relaxed.sys",
)
_GLOBAL_STORES = (
    *expand(".global.L1::{evict_first|evict_last|evict_normal|evict_unchanged|no_allocate}"),
    *expand(".global{|.L1::evict_last|.L1::no_allocate}.L2::cache_hint"),
)


def _bits(t: str) -> int:
    return int(t[1:])


def _spread(t: str) -> list[int]:
    """Widths of registers that a value of the type may go to or come from: none below 16 bits."""
    if t[0] == "f":
        return [_bits(t)]
    return [w for w in (16, 32, 64) if w >= _bits(t)]


def _registers(width: int, count: int, first: int = 0) -> list[str]:
    return [f"%{ {16: 'h', 32: 'r', 64: 'w'}[width] }{first + k}" for k in range(count)]


def _braced(registers: list[str]) -> str:
    return registers[0] if len(registers) == 1 else f"{{{', '.join(registers)}}}"


def _plain() -> Iterator[tuple[str, str, int, int]]:
    """(vector and type, type, elements, register width) of every access up to 16 bytes."""
    for t in _TYPES.split():
        for vector, count in _VECTORS.items():
            if count * _bits(t) <= 128:
                for width in _spread(t):
                    yield f"{vector}.{t}", t, count, width


# space -> (how it is prepared from %w60, the thread's slot in global memory; its address)
_SPACES = {
    ".global": ("", "%w60"),
    "": ("", "%w60"),
    ".shared": ("shared", "%r70"),
    ".shared::cta": ("shared", "%r70"),
    ".shared::cluster": ("cluster", "%r70"),
    ".local": ("local", "%w70"),
}
_SLOT_OF_THREAD = f"""mad.lo.u32 %r60, %cta, {THREADS}, %thread;
mul.wide.u32 %w61, %r60, {_SLOT}; add.u64 %w60, %a, %w61; mul.wide.u32 %w62, %r60, 64;"""
_PREPARED = {
    "": "",
    "shared": "mov.u32 %r70, slots; mad.lo.u32 %r70, %thread, 32, %r70;",
    "cluster": "mov.u32 %r70, slots; mad.lo.u32 %r70, %thread, 32, %r70;"
    " mapa.shared::cluster.u32 %r70, %r70, %rank;",
    "local": "mov.u64 %w70, mine;",
}
_DECLARED = {
    "": "",
    "shared": f".shared .align 32 .b8 slots[{THREADS * _SLOT}];",
    "cluster": f".shared .align 32 .b8 slots[{THREADS * _SLOT}];",
    "local": f".local .align 32 .b8 mine[{_SLOT}];",
}


def _copied(space: str, address: str, back: str = "") -> str:
    """The slot from global memory into a space, or back to `back`."""
    lines = []
    for k in (0, 16):
        registers = "{%r64, %r65, %r66, %r67}"
        if back:
            lines.append(f"ld{space}.v4.b32 {registers}, [{address}+{k}];")
            lines.append(f"st.global.v4.b32 [{back}+{k}], {registers};")
        else:
            lines.append(f"ld.global.v4.b32 {registers}, [%w60+{k}];")
            lines.append(f"st{space}.v4.b32 [{address}+{k}], {registers};")
    return "\n".join(lines)


def _load_lines(opcode: str, address: str, t: str, count: int, width: int) -> list[str]:
    """Load, and leave every register in the thread's row of the variant (64 bytes)."""
    registers = _registers(width, count)
    policy = f", {EVICT_FIRST}" if "cache_hint" in opcode else ""
    offset = 0 if count * _bits(t) == 128 else 16
    lines = [f"{opcode} {_braced(registers)}, [{address}+{offset}]{policy};"]
    for k, register in enumerate(registers):
        lines.append(f"st.global.b{width} [%w63+{k * width // 8}], {register};")
    return lines


def _case(name: str, subject: str, space: str, bodies: list[list[str]], store: bool) -> Case:
    how, address = _SPACES[space]
    body = [_SLOT_OF_THREAD, _PREPARED[how]]
    if how and not store:
        body.append(_copied(space, address))
    for k, lines in enumerate(bodies):
        body += [f"add.u64 %w63, %d, {k * INPUTS * 64}; add.u64 %w63, %w63, %w62;", *lines]
    params = [random_buffer("a", name, "u4", INPUTS * _SLOT // 4)]
    params.append(output("d", "u4", len(bodies) * INPUTS * 16))
    return case(
        name,
        subject,
        body,
        params,
        declared=_DECLARED[how],
        rows=tuple((_stored(lines) if store else lines[0].split()[0],) for lines in bodies),
    )


def _stored(lines: list[str]) -> str:
    """The store of a variant, not those that clear its slot."""
    stores = (line for line in lines if line.startswith("st") and "{%r71, " not in line)
    return next(stores).split()[0]


def _wide_load(space: str, address: str) -> list[str]:
    lines = [f"ld{space}.b128 %q0, [{address}+16]; mov.b128 {{%w0, %w1}}, %q0;"]
    return [*lines, "st.global.v2.b64 [%w63], {%w0, %w1};"]


def _wide_store(space: str, address: str) -> list[str]:
    lines = ["ld.global.v2.b64 {%w0, %w1}, [%w60]; mov.b128 %q0, {%w0, %w1};"]
    lines.append(f"st{space}.b128 [{address}+16], %q0;")
    return lines if address == "%w63" else [*lines, _copied(space, address, "%w63")]


def loads() -> Iterator[Case]:
    for space, (_, address) in _SPACES.items():
        plain = [
            _load_lines(f"ld{space}{form}", address, t, count, width)
            for form, t, count, width in _plain()
        ]
        plain.append(_wide_load(space, address))
        yield _case(f"loads{space}", "ld", space, plain, False)
        if space in (".local", ".shared::cta", ".shared::cluster"):
            continue
        orders = _LOADS if space != ".shared" else _LOADS[:2] + _LOADS[7:-1]
        bodies = [
            _load_lines(f"ld{order}{space}{form}", address, t, count, width)
            for order in orders
            for form, t, count, width in ((".b32", "b32", 1, 32), (".v2.u64", "u64", 2, 64))
            if not (order == ".mmio.relaxed.sys" and count > 1)
        ]
        yield _case(f"ordered loads{space}", "ld", space, bodies, False)
    hinted = [
        _load_lines(f"ld{order}{form}", "%w60", t, count, width)
        for pattern in _GLOBAL_LOADS
        for order in expand(pattern)
        for form, t, count, width in ((".b32", "b32", 1, 32), (".v4.f32", "f32", 4, 32))
    ]
    yield _case("hinted loads", "ld", ".global", hinted, False)
    bodies = [
        _load_lines(f"ldu{space}{form}", "%w60", t, count, width)
        for space in (".global", "")
        for form, t, count, width in _plain()
    ]
    bodies.append([line.replace("ld.", "ldu.", 1) for line in _wide_load(".global", "%w60")])
    yield _case("uniform loads", "ldu", ".global", bodies, False)


def _store_lines(opcode: str, space: str, address: str, t: str, count: int, width: int) -> list:
    """Clear the slot, store, and bring the slot to the thread's row of the variant."""
    registers = _registers(width, count)
    lines = []
    for k, register in enumerate(registers):
        lines.append(f"ld.global.b{width} {register}, [%w60+{k * width // 8}];")
    for k in (0, 16):
        lines.append(f"st{space}.v4.b32 [{address}+{k}], {{%r71, %r71, %r71, %r71}};")
    policy = f", {EVICT_FIRST}" if "cache_hint" in opcode else ""
    offset = 0 if count * _bits(t) == 128 else 16
    lines.append(f"{opcode} [{address}+{offset}], {_braced(registers)}{policy};")
    if address != "%w63":
        lines.append(_copied(space, address, "%w63"))
    return ["mov.b32 %r71, 0;", *lines]


def stores() -> Iterator[Case]:
    for space, (_, address) in _SPACES.items():
        where = "%w63" if address == "%w60" else address
        plain = [
            _store_lines(f"st{space}{form}", space, where, t, count, width)
            for form, t, count, width in _plain()
        ]
        plain.append(_wide_store(space, where))
        yield _case(f"stores{space}", "st", space, plain, True)
        if space in (".local", ".shared::cta", ".shared::cluster"):
            continue
        orders = _STORES if space != ".shared" else _STORES[:2] + _STORES[6:-1]
        bodies = [
            _store_lines(f"st{order}{space}{form}", space, where, t, count, width)
            for order in orders
            for form, t, count, width in ((".b32", "b32", 1, 32), (".v2.u64", "u64", 2, 64))
            if not (order == ".mmio.relaxed.sys" and count > 1)
        ]
        yield _case(f"ordered stores{space}", "st", space, bodies, True)
    hinted = [
        _store_lines(f"st{order}{form}", ".global", "%w63", t, count, width)
        for pattern in _GLOBAL_STORES
        for order in expand(pattern)
        for form, t, count, width in ((".b32", "b32", 1, 32), (".v4.f32", "f32", 4, 32))
    ]
    yield _case("hinted stores", "st", ".global", hinted, True)


def cases() -> Iterator[Case]:
    yield from loads()
    yield from stores()
