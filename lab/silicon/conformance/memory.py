"""Loads and stores: every type, vector, register width, space and cache operator; address forms."""

from __future__ import annotations

from collections.abc import Iterator

from lab.silicon.conformance.case import Case
from lab.silicon.conformance.kernel import (
    INPUTS,
    THREADS,
    braced,
    case,
    output,
    policy,
    random_buffer,
    registers,
)
from lab.silicon.conformance.patterns import expand

_SLOT = 32  # bytes of a thread
_TYPES = "b8 u8 s8 b16 u16 s16 b32 u32 s32 f32 b64 u64 s64 f64"
_VECTORS = {"": 1, ".v2": 2, ".v4": 4}
_SCOPES = "{cta|cluster|gpu|sys}"

# qualifiers of an access in front of its space, and what stands behind it
_ORDERS = {
    "ld": (
        *expand(".{weak|volatile|ca|cg|cs|lu|cv}"),
        *expand(f".{{relaxed|acquire}}.{_SCOPES}"),
        ".mmio.relaxed.sys",
    ),
    "st": (
        *expand(".{weak|volatile|wb|cg|cs|wt}"),
        *expand(f".{{relaxed|release}}.{_SCOPES}"),
        ".mmio.relaxed.sys",
    ),
}
_GLOBAL_ONLY = (*expand(".{ca|cg|cs|lu|cv|wb|wt}"), ".mmio.relaxed.sys")
_EVICTION = "{evict_first|evict_last|evict_normal|evict_unchanged|no_allocate}"
_HINTS = {
    "ld": (
        *expand(".global{|.nc}.L1::no_allocate.L2::128B"),
        *expand(".global{|.ca|.cg|.cs}.nc"),
        *expand(f".global{{|.nc}}.L1::{_EVICTION}"),
        *expand(".global{|.nc}.L2::{64B|128B|256B}"),
        *expand(".global{|.nc}.L1::{evict_last|no_allocate}.L2::cache_hint"),
        *expand(".global{|.nc}.L2::cache_hint"),
    ),
    "st": (
        *expand(f".global.L1::{_EVICTION}"),
        *expand(".global{|.L1::evict_last|.L1::no_allocate}.L2::cache_hint"),
    ),
}


def _bits(t: str) -> int:
    return int(t[1:])


def _spread(t: str) -> list[int]:
    """Widths of registers that a value of the type may go to or come from: none below 16 bits."""
    if t[0] == "f":
        return [_bits(t)]
    return [w for w in (16, 32, 64) if w >= _bits(t)]


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
        values = braced(registers(32, 4, 64))
        source, target = (space, address), (".global", back)
        if not back:
            source, target = (".global", "%w60"), source
        lines.append(f"ld{source[0]}.v4.b32 {values}, [{source[1]}+{k}];")
        lines.append(f"st{target[0]}.v4.b32 [{target[1]}+{k}], {values};")
    return "\n".join(lines)


def _load_lines(opcode: str, space: str, address: str, t: str, count: int, width: int) -> list[str]:
    """Load, and leave every register in the thread's row of the variant (64 bytes)."""
    names = registers(width, count)
    offset = 0 if count * _bits(t) == 128 else 16
    lines = [f"{opcode} {braced(names)}, [{address}+{offset}]{policy(opcode)};"]
    for k, register in enumerate(names):
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


def _store_lines(opcode: str, space: str, address: str, t: str, count: int, width: int) -> list:
    """Clear the slot, store, and bring the slot to the thread's row of the variant."""
    names, lines = registers(width, count), []
    for k, register in enumerate(names):
        lines.append(f"ld.global.b{width} {register}, [%w60+{k * width // 8}];")
    for k in (0, 16):
        lines.append(f"st{space}.v4.b32 [{address}+{k}], {{%r71, %r71, %r71, %r71}};")
    offset = 0 if count * _bits(t) == 128 else 16
    lines.append(f"{opcode} [{address}+{offset}], {braced(names)}{policy(opcode)};")
    if address != "%w63":
        lines.append(_copied(space, address, "%w63"))
    return ["mov.b32 %r71, 0;", *lines]


def _accesses(name: str, title: str) -> Iterator[Case]:
    store = name == "st"
    make, wide = (_store_lines, _wide_store) if store else (_load_lines, _wide_load)
    for space, (_, address) in _SPACES.items():
        where = "%w63" if store and address == "%w60" else address
        bodies = [make(f"{name}{space}{form}", space, where, *how) for form, *how in _plain()]
        bodies.append(wide(space, where))
        yield _case(f"{title}{space}", name, space, bodies, store)
        if space in (".local", ".shared::cta", ".shared::cluster"):
            continue
        bodies = [
            make(f"{name}{order}{space}{form}", space, where, t, count, width)
            for order in _ORDERS[name]
            if not (space == ".shared" and order in _GLOBAL_ONLY)
            for form, t, count, width in ((".b32", "b32", 1, 32), (".v2.u64", "u64", 2, 64))
            if not (order == ".mmio.relaxed.sys" and count > 1)
        ]
        yield _case(f"ordered {title}{space}", name, space, bodies, store)
    hinted = [
        make(f"{name}{order}{form}", ".global", "%w63" if store else "%w60", t, count, width)
        for order in _HINTS[name]
        for form, t, count, width in ((".b32", "b32", 1, 32), (".v4.f32", "f32", 4, 32))
    ]
    yield _case(f"hinted {title}", name, ".global", hinted, store)


def _uniform_loads() -> Case:
    bodies = [
        _load_lines(f"ldu{space}{form}", space, "%w60", *how)
        for space in (".global", "")
        for form, *how in _plain()
    ]
    bodies.append([line.replace("ld.", "ldu.", 1) for line in _wide_load(".global", "%w60")])
    return _case("uniform loads", "ldu", ".global", bodies, False)


def cases() -> Iterator[Case]:
    yield from _accesses("ld", "loads")
    yield _uniform_loads()
    yield from _accesses("st", "stores")
