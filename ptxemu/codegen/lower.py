"""Translation of a basic block's instructions to nodes over values: the context of all emitters.

An emitter asks for operands in the type it computes in (`src`), states elementwise results (`pure`)
or steps on the machine (`effect`), and binds destinations (`dst`). The same emitters run once over
the whole kernel in analysis mode, where only register uses, types and dependences are recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ptxemu.codegen.blocks import Block
from ptxemu.codegen.values import (
    DTYPE,
    UNSIGNED,
    VARYING,
    WIDTH,
    Late,
    Node,
    RegisterFile,
    Value,
    bits_of_double,
    bits_of_float,
    constant,
    convert_templates,
)
from ptxemu.errors import PtxSyntaxError, UnsupportedPtx
from ptxemu.syntax.tree import Addr, Imm, Instr, Not, Pair, Reg, Special, Sym, Vec

# Special registers: PTX ISA "Special Registers". name -> (type, uniform?, expression,
# constant?).

_AXES = {"x": 0, "y": 1, "z": 2}


def _axes(name: str, text: str, uniform: bool = True) -> dict[str, Any]:
    return {f"%{name}.{axis}": ("u32", uniform, text.format(k), True) for axis, k in _AXES.items()}


SPECIALS: dict[str, tuple[str, bool, str, bool]] = {
    **_axes("tid", "w.tid[{}]", uniform=False),
    **_axes("ntid", "w.machine.shape.block[{}]"),
    **_axes("ctaid", "w.cta.ctaid[{}]"),
    **_axes("nctaid", "w.machine.shape.grid[{}]"),
    **_axes("cluster_ctaid", "w.cta.ctaid[{0}] % w.machine.shape.cluster[{0}]"),
    **_axes("cluster_nctaid", "w.machine.shape.cluster[{}]"),
    **_axes("clusterid", "w.cta.ctaid[{0}] // w.machine.shape.cluster[{0}]"),
    **_axes("nclusterid", "w.machine.cluster_grid[{}]"),
    "%laneid": ("u32", False, "LANES", True),
    "%warpid": ("u32", True, "w.index", True),
    "%nwarpid": ("u32", True, "len(w.cta.warps)", True),
    "%smid": ("u32", True, "w.machine.sm_of(w.cta)", True),
    "%nsmid": ("u32", True, "w.machine.sm_count", True),
    "%gridid": ("u64", True, "0", True),
    "%cluster_ctarank": ("u32", True, "w.cta.rank", True),
    "%cluster_nctarank": ("u32", True, "len(w.cluster.ctas)", True),
    "%is_explicit_cluster": ("pred", True, "w.machine.shape.explicit", True),
    "%dynamic_smem_size": ("u32", True, "w.machine.shape.smem_bytes", True),
    "%total_smem_size": ("u32", True, "w.cta.smem_size", True),
    "%clock": ("u32", True, "clock(w) & 0xffffffff", False),
    "%clock_hi": ("u32", True, "clock(w) >> 32", False),
    "%clock64": ("u64", True, "clock(w)", False),
    "%globaltimer": ("u64", True, "clock(w)", False),
    "%globaltimer_lo": ("u32", True, "clock(w) & 0xffffffff", False),
    "%globaltimer_hi": ("u32", True, "clock(w) >> 32", False),
    "%lanemask_eq": ("u32", False, "BITS", True),
    "%lanemask_lt": ("u32", False, "BITS - U32(1)", True),
    "%lanemask_le": ("u32", False, "(BITS - U32(1)) | BITS", True),
    "%lanemask_gt": ("u32", False, "~((BITS - U32(1)) | BITS)", True),
    "%lanemask_ge": ("u32", False, "~(BITS - U32(1))", True),
    "%smem_base": ("u32", True, "w.smem_base", True),  # not PTX: of this CTA's shared symbols
}


Store = tuple[str, int, Value]  # register, slot, what goes there
NATURAL = {1: "pred", 8: "u16", 16: "u16", 32: "u32", 64: "u64"}


@dataclass(eq=False)
class Lower:
    """Lowers one block in one version. `partial` is 0 (all 32 lanes active), 1 (all live lanes
    active) or 2 (a fragment of the live lanes: register writes are merged under the mask)."""

    block: Block
    registers: RegisterFile
    symbols: dict[str, tuple[str, int]]
    partial: int = 0
    nonuniform: frozenset[str] = frozenset()
    late: bool = False
    observed: bool = False
    analysis: bool = False
    pending: frozenset[str] = frozenset()  # roots of registers whose data may be yet to come
    env: dict[str, Value | tuple[Value, Value]] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    uses: set[str] = field(default_factory=set)
    defs: set[str] = field(default_factory=set)
    instr: Instr | None = None
    open_loads: list[Late] = field(default_factory=list)  # tcgen05.ld issued in this block
    waits: bool = False  # the block completes all tcgen05.ld from before it
    arguments: dict[str, Value] = field(default_factory=dict)  # of a call, by .param variable
    jump: Value | None = None  # which target the terminator takes, where it has several
    _specials: dict[str, Value] = field(default_factory=dict)

    # -- reading operands -------------------------------------------------------------------

    def src(self, operand: object, type_: str) -> Value:
        """The operand as a value of `type_` (pred, u16.., s16.., f32, f64)."""
        if isinstance(operand, Reg):
            self.registers.vote(operand.name, type_)
            return self.convert(self._register(operand.name), type_)
        if isinstance(operand, Imm):
            return self._immediate(operand, type_)
        if isinstance(operand, Not):
            value = self.src(operand.reg, "pred")
            return self.convert(self.pure("pred", "(not {0})", "~{0}", value), type_)
        if isinstance(operand, Special):
            return self.convert(self._special(operand.name), type_)
        if isinstance(operand, Sym):
            return self.convert(self.symbol(operand), type_)
        raise UnsupportedPtx(f"operand {operand!r} is not supported here")

    def srcs(self, operands: Iterable[object], type_: str) -> list[Value]:
        """Several operands, all as values of `type_`."""
        return [self.src(operand, type_) for operand in operands]

    def raw(self, operand: object, width: int) -> Value:
        """The operand in whatever type its bits are held now; for moves, selects and stores."""
        if isinstance(operand, Reg):
            value = self._register(operand.name)
            if isinstance(value, tuple):
                return self.convert(value, "u64")
            if WIDTH[value.type] == width or width == 1:
                return value
            return self.convert(value, NATURAL[width])
        return self.src(operand, NATURAL[width])

    def halves(self, operand: object, type_: str | None = None) -> tuple[Value, Value]:
        """Low and high half of a 64-bit (or 128-bit) operand, optionally converted to `type_`."""
        value = (
            self._register(operand.name) if isinstance(operand, Reg) else self.src(operand, "u64")
        )
        if isinstance(operand, Reg) and type_ == "f32":
            self.registers.vote(operand.name, "pair")
        if not isinstance(value, tuple):
            wide = self.convert(value, "u64")
            value = (
                self.pure("u32", "({0} & 0xffffffff)", "{0}.astype(U32)", wide),
                self.pure("u32", "({0} >> 32)", "({0} >> 32).astype(U32)", wide),
            )
        if type_ is None:
            return value
        return self.convert(value[0], type_), self.convert(value[1], type_)

    def symbol(self, symbol: Sym) -> Value:
        """The address of a symbol in its own state space; shared ones carry the CTA's rank."""
        if symbol.name not in self.symbols:
            raise UnsupportedPtx(f"unknown symbol {symbol.name!r}")
        space, start = self.symbols[symbol.name]
        start += symbol.offset
        if space != "shared":
            return constant(start, "u64")
        return self.pure(
            "u32", f"({{0}} + {start})", f"{{0}} + {start}", self._special("%smem_base")
        )

    def address(self, operand: Addr, width: int = 32) -> Value:
        """Return base + offset of a bracketed operand, as u32 or u64."""
        type_ = NATURAL[width]
        base = operand.base
        if isinstance(base, Sym):
            return self.convert(self.symbol(Sym(base.name, base.offset + operand.offset)), type_)
        if isinstance(base, Imm):
            return constant(int(base.value) + operand.offset, type_)
        if isinstance(base, Reg) and self.registers.width(base.name) == 32 and width == 64:
            value = self.pure("u64", "{0}", "{0}.astype(U64)", self.src(base, "u32"))
        else:
            value = self.src(base, type_)
        if operand.offset == 0:
            return value
        mask = (1 << width) - 1
        return self.pure(
            type_,
            f"(({{0}} + {operand.offset}) & {mask:#x})",
            f"{{0}} + {operand.offset & mask}",
            value,
        )

    def _register(self, name: str) -> Value | tuple[Value, Value]:
        found = self.env.get(name)
        if found is not None:
            return found
        self.uses.add(name)
        loaded = [
            Value(type_, self._uniform_in(name), deps=frozenset((name,)), expr=f"R[{slot}]")
            for slot, type_ in self.registers.slots(name)
        ]
        if self.late and self.registers.root(name) in self.pending:
            for value in loaded:
                if not value.uniform:
                    value.late = Late(value)
        self.env[name] = loaded[0] if len(loaded) == 1 else (loaded[0], loaded[1])
        return self.env[name]

    def _uniform_in(self, name: str) -> bool:
        if self.analysis:
            return True
        return not self.registers.always_varying(name) and name not in self.nonuniform

    def _immediate(self, operand: Imm, type_: str) -> Value:
        value = operand.value
        encode = bits_of_double if type_ == "f64" else bits_of_float
        if operand.float_bits == 64 and type_ == "f32":
            raise UnsupportedPtx("a 64-bit float literal in a 32-bit operand")
        if isinstance(value, float):
            return constant(encode(value), type_)
        if type_ in ("f32", "f64") and not operand.float_bits and abs(value) < 2**24:
            return constant(encode(float(value)), type_)
        return constant(value, type_)

    def _special(self, name: str) -> Value:
        if name not in self._specials:
            if name not in SPECIALS:
                raise UnsupportedPtx(f"special register {name} is not supported")
            type_, uniform, text, cached = SPECIALS[name]
            value = self.effect(text, results=[(type_, uniform)])[0]
            if not cached:
                return value
            self._specials[name] = value
        return self._specials[name]

    # -- making values ----------------------------------------------------------------------

    def pure(
        self,
        type_: str,
        scalar: str | None,
        vector: str,
        *srcs: Value,
        wide: bool = True,
        settles: bool = True,
    ) -> Value:
        """An elementwise result. `scalar` is the template on Python scalars, `vector` on arrays;
        where `scalar` is None the vector template runs on one-element arrays."""
        if settles:
            self.settle(*srcs)
        uniform = all(value.uniform for value in srcs)
        deps = frozenset().union(*(value.deps for value in srcs)) if self.analysis else frozenset()
        out = Value(type_, uniform, deps=deps)
        if self.analysis:
            return out
        if uniform and scalar is None:
            text = vector
            for j, value in enumerate(srcs):
                one = f"np.array([{{{j}}}], {DTYPE[value.type]})"
                one = f"one_f32({{{j}}})" if value.type == "f32" else one
                text = text.replace(f"{{t{j}}}", f"{{{j}}}").replace(f"{{{j}}}", one)
            text = f"item_f32({text})" if type_ == "f32" else f"({text})[0].item()"
        else:
            text = vector if scalar is None or not uniform else scalar
        node = Node(text, srcs, (out,), pure=True, wide=wide and not uniform, instr=self.instr)
        node.lanes = vector if uniform and scalar is None else ""
        out.node = node
        self.nodes.append(node)
        return out

    def call(self, type_: str, function: str, values: Sequence[Value], keywords: str = "") -> Value:
        """The elementwise result of a function of `numerics`; keywords: ", name=value" each."""
        return self.pure(type_, None, f"{function}({fields(values)}{keywords})", *values)

    def low_byte(self, value: Value) -> Value:
        return self.pure("u16", "({0} & 0xff)", "{0} & 0xff", value)

    def convert(self, value: Value | tuple[Value, Value], type_: str) -> Value:
        """Convert a value to `type_` with the same bits.

        A pair joins to 64 bits; other widths truncate or extend.
        """
        if isinstance(value, tuple):
            value = self.join(*value)
        if value.type == type_:
            return value
        if value.const is not None:
            return constant(_constant_bits(value), type_)
        if value.converted is None:
            value.converted = {}
        if type_ not in value.converted:
            value.converted[type_] = self._convert(value, type_)
        return value.converted[type_]

    def _convert(self, value: Value, type_: str) -> Value:
        source, target = WIDTH[value.type], WIDTH[type_]
        if source == target:
            scalar, vector = convert_templates(value.type, type_)
            out = self.pure(type_, scalar, vector, value, settles=False)
            if value.late is not None:
                out.late = value.late
                if out.node is not None:
                    out.node.view = True
            return out
        if source == 1 or target == 1:
            raise PtxSyntaxError(f"a predicate is used as {type_}")
        narrow = self.convert(value, UNSIGNED[source])
        middle = self.pure(
            UNSIGNED[target],
            f"({{0}} & {(1 << target) - 1:#x})",
            f"{{0}}.astype({DTYPE[UNSIGNED[target]]})",
            narrow,
        )
        return self.convert(middle, type_)

    def join(self, low: Value, high: Value) -> Value:
        """Two 32-bit values -> one u64."""
        low, high = self.convert(low, "u32"), self.convert(high, "u32")
        if low.const is not None and high.const is not None:
            return constant(low.const | high.const << 32, "u64")
        return self.pure("u64", "({0} | {1} << 32)", "join64({0}, {1})", low, high)

    def effect(
        self,
        text: str,
        *srcs: Value,
        results: Sequence[tuple[str, bool]] = (),
        rows: tuple[Value, ...] = (),
        matrix: bool = False,
        parks: bool = False,
        deps: tuple[Value, ...] | None = None,
        settles: bool = True,
        repeatable: bool = False,
    ) -> list[Value]:
        """A step in program order. `results` are (type, uniform); `<m>` and `<mb>` in the text are
        the active lanes as array (None: all) and as bits. `deps` limits the uniformity dependences
        of the results (default: all operands). A step that `parks` returns None when it has to
        wait. One that does not settle only passes on operands that may be late. A `repeatable` one
        depends on its operands alone and changes nothing."""
        if settles:
            self.settle(*srcs, *rows)
        inherited: frozenset[str] = frozenset()
        if self.analysis:
            used = (*srcs, *rows) if deps is None else deps
            inherited = frozenset().union(*(value.deps for value in used))
        outs = tuple(
            Value(type_, uniform, deps=inherited if uniform else inherited | {VARYING})
            for type_, uniform in results
        )
        node = Node(text, srcs, outs, matrix=matrix, rows=rows, parks=parks, instr=self.instr)
        node.repeatable = repeatable
        for index, out in enumerate(outs):
            out.node, out.index = node, index
        if not self.analysis:
            self.nodes.append(node)
        return list(outs)

    def announce(self, event: str, *srcs: Value) -> None:
        """An event of `machine.listener` that has no other effect; no code where none listens."""
        if self.observed:
            self.effect(f"for each in w.listeners: each.{event}", *srcs)

    def settle(self, *srcs: Value) -> None:
        """Under the adversarial policy, complete a pending tcgen05.ld before its first real use."""
        if not self.late:
            return
        for value in srcs:
            late = value.late
            if late is not None and not late.settled:
                late.settled = True
                self.nodes.append(Node("settle_value(w, {0})", (late.value,), (), instr=self.instr))

    def wait_for_loads(self) -> None:
        """Every tcgen05.ld so far has happened."""
        self.waits = True
        for late in self.open_loads:
            late.settled = True

    def unsettled(self) -> set[str]:
        """Roots of the registers that are written here and whose data may come after the block."""
        values = [(name, self.env[name]) for name in self.defs]
        parts = [(n, p) for n, v in values for p in (v if isinstance(v, tuple) else (v,))]
        return {self.registers.root(n) for n, p in parts if p.late and not p.late.settled}

    # -- binding destinations ---------------------------------------------------------------

    def dst(self, operand: object, value: Value | tuple[Value, Value]) -> None:
        """Bind a destination register; `None` is the sink. A narrower value is extended to the
        register's width (sign-extended where its type is signed)."""
        if operand is None:
            return
        if not isinstance(operand, Reg):
            raise UnsupportedPtx(f"destination {operand!r} is not a register")
        name = operand.name
        if isinstance(value, tuple):
            self.registers.vote(name, "pair", 1 + sum(half.type == "f32" for half in value))
        else:
            width = self.registers.width(name)
            if WIDTH[value.type] < width:
                value = self._extend(value, width)
            elif WIDTH[value.type] > width:
                value = self.convert(value, UNSIGNED[width])
        self._bind(name, value)

    def _bind(self, name: str, value: Value | tuple[Value, Value]) -> None:
        self.env[name] = value
        self.defs.add(name)
        if self.analysis:
            self.registers.define(name, value)

    def _extend(self, value: Value, width: int) -> Value:
        target = UNSIGNED[width]
        if value.type[0] == "s":
            return self.pure(
                target,
                f"({{0}} & {(1 << width) - 1:#x})",
                f"{{0}}.astype({DTYPE['s' + str(width)]}).view({DTYPE[target]})",
                value,
            )
        value = self.convert(value, UNSIGNED[WIDTH[value.type]])
        return self.pure(target, "{0}", f"{{0}}.astype({DTYPE[target]})", value)

    def copy(self, destination: object, source: object, width: int) -> None:
        """A move: the bits as they are held, no node: a pending tcgen05.ld stays pending."""
        if isinstance(source, Reg) and width == 64:
            value = self._register(source.name)
        else:
            value = self.raw(source, width)
        if isinstance(destination, Reg):
            if isinstance(source, Reg):
                self.registers.alias(destination.name, source.name)
            self._bind(destination.name, value)

    def finish(self, *, guarded: bool = True) -> tuple[list[Store], Value | None]:
        """Live-out register slots as (register, slot, value), and the terminator's guard, if it is
        wanted."""
        wanted = self.block.guard if guarded else None
        guard = None if wanted is None else self.src(wanted, "pred")
        stores = []
        for name in sorted(self.defs & self.block.live_out):
            slots, value = self.registers.slots(name), self.env[name]
            parts: tuple[Value, ...]
            if len(slots) == 1:
                parts = (value if isinstance(value, Value) else self.join(*value),)
            else:
                parts = value if isinstance(value, tuple) else self.halves(Reg(name))
            for (slot, type_), part in zip(slots, parts, strict=True):
                part = self.convert(part, type_)
                if self.partial == 2:
                    self.settle(part)
                stores.append((name, slot, part))
        return stores, guard

    def each(self, operand: object) -> tuple[Any, ...]:
        """Items of a vector operand, or the operand alone."""
        if isinstance(operand, Vec):
            if not operand.items:
                raise ValueError("an empty vector")
            return operand.items
        if isinstance(operand, Pair):
            return (operand.first, operand.second)
        return (operand,)

    def both(self, operand: object) -> tuple[object, object]:
        """Return a and b of `a|b`; b is the sink if there is one operand."""
        return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, None)


def fields(values: Sequence[Value], first: int = 0) -> str:
    """Return a template's names of the operands `first` and up: "{0}, {1}"."""
    return ", ".join(f"{{{first + k}}}" for k in range(len(values)))


def _constant_bits(value: Value) -> int:
    if value.type == "f32":
        return bits_of_float(value.const)
    if value.type == "f64":
        return bits_of_double(value.const)
    return int(value.const)
