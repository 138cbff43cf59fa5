"""Undefined data in registers: its propagation, and the places it must not reach.

Reading unwritten memory is no fault, nor is computing with it: compilers use registers that were
never written, and rows missing in a partial tile are computed and dropped. It is reported when it
reaches global memory, an address, a branch, the predicate of an instruction, or an operand of a
barrier or of an MMA. Global memory counts as defined.

While no register of a warp is undefined, its blocks run unchanged. A read of undefined data stops a
block, which continues in a form that reports the effect of each instruction (`codegen.tainted`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, reduce
from itertools import compress
from operator import or_

import numpy as np

from ptxemu.check.findings import Findings
from ptxemu.check.undefined import CODE, NEVER, rescale
from ptxemu.codegen import registry
from ptxemu.codegen.flow import METADATA, Flow, UndefinedRead, names
from ptxemu.codegen.namespace import bits_mask, mask_bits
from ptxemu.findings import Access, Finding, place_of
from ptxemu.machine.state import Warp
from ptxemu.numerics import PerLane
from ptxemu.ops.warp import shuffle_lanes
from ptxemu.ops.warp_mma import metadata_lanes
from ptxemu.syntax.tree import Instr, Vec

# Propagation of undefined data between registers.
#
# A register's mask has bit l set if its value is undefined in lane l. For a 64-bit register, bit
# 32 + l represents the upper half. Each rule gives the masks of the registers that an instruction
# writes.

ALL = 0xFFFFFFFF
Masks = Mapping[str | None, int]


def lanes_of(mask: int) -> int:
    """Lanes in which any part is undefined."""
    return (mask | mask >> 32) & ALL


def both_halves(lanes: int) -> int:
    return lanes | lanes << 32


def _union(masks: Masks, names: Iterable[str | None]) -> int:
    """Return the mask of lanes in which any of the registers is undefined."""
    return reduce(or_, (masks.get(name, 0) for name in names), 0)


def _any(flow: Flow, masks: Masks) -> int:
    """Lanes in which some source is undefined."""
    return lanes_of(_union(masks, flow.sources))


def _to_all(flow: Flow, lanes: int) -> list[int]:
    return [both_halves(lanes) if name in flow.wide else lanes for name in flow.targets]


def _values(flow: Flow, masks: Masks, mb: int) -> list[int]:
    """Whatever is computed from undefined data is undefined."""
    return _to_all(flow, _any(flow, masks))


def _halves(flow: Flow, masks: Masks, mb: int) -> list[int]:
    """Moves and packed f32x2: each half from the same halves."""
    total = _union(masks, flow.sources)
    return [total if name in flow.wide else lanes_of(total) for name in flow.targets]


def _pack(flow: Flow, masks: Masks, mb: int) -> list[int]:
    if flow.targets[0] not in flow.wide:
        return [_any(flow, masks)]
    middle = len(flow.sources) // 2
    low, high = (_union(masks, part) for part in (flow.sources[:middle], flow.sources[middle:]))
    return [lanes_of(low) | lanes_of(high) << 32]


def _unpack(flow: Flow, masks: Masks, mb: int) -> list[int]:
    whole = masks.get(flow.sources[0], 0)
    if flow.sources[0] not in flow.wide:
        return [whole] * len(flow.targets)
    middle, low, high = len(flow.targets) // 2, whole & ALL, whole >> 32
    parts = [low if k < middle else high for k in range(len(flow.targets))]
    return [
        both_halves(part) if name in flow.wide else part
        for name, part in zip(flow.targets, parts, strict=True)
    ]


def _where(value: PerLane) -> int:
    """Lanes in which a predicate holds."""
    return (ALL if value else 0) if np.ndim(value) == 0 else mask_bits(value)


def _select(flow: Flow, masks: Masks, mb: int, predicate: PerLane) -> list[int]:
    """Undefined only if the side that was chosen is, or the choice."""
    first, second, choice = (masks.get(name, 0) for name in flow.sources)
    yes = both_halves(_where(predicate))
    mask = first & yes | second & ~yes | both_halves(choice)
    return [mask if name in flow.wide else mask & ALL for name in flow.targets]


def _mask(flow: Flow, masks: Masks, mb: int, a: PerLane, b: PerLane) -> list[int]:
    """`and` with zero is zero, `or` with all ones is all ones, whatever the other operand is."""
    first, second = (lanes_of(masks.get(name, 0)) for name in flow.sources)
    if flow.instr.root == "and":
        fixed = [_where(np.equal(value, 0)) for value in (a, b)]
    elif flow.instr.type == "pred":
        fixed = [_where(value) for value in (a, b)]
    else:
        ones = (1 << int(flow.instr.type[1:])) - 1
        fixed = [_where(np.equal(value, ones)) for value in (a, b)]
    lanes = first & (second | ~fixed[1]) | second & (first | ~fixed[0])
    return _to_all(flow, lanes & ALL)


def _shuffle(flow: Flow, masks: Masks, mb: int, lane: PerLane, clamp: PerLane) -> list[int]:
    """Return the result of a shuffle: each lane has the mask bit of its source lane."""
    mode = next(part for part in flow.instr.parts if part in ("up", "down", "bfly", "idx"))
    moved, _ = shuffle_lanes(
        bits_mask(masks.get(flow.sources[0], 0)).astype(np.uint32), mode, lane, clamp, mb
    )
    control = _union(masks, flow.sources[1:])
    return [mask_bits(moved != 0) | control, control][: len(flow.targets)]


def _vote(flow: Flow, masks: Masks, mb: int, predicate: PerLane, members: PerLane) -> list[int]:
    """A defined lane may decide for all: one that is true for .any, one that is false for .all."""
    unknown = masks.get(flow.sources[0], 0) & mb
    if np.ndim(members) == 0:
        unknown &= members
        known = members & mb & ~unknown
        decided = {"any": known & _where(predicate), "all": known & ~_where(predicate)}
        if any(decided.get(part) for part in flow.instr.parts):
            return [0]
    return [mb if unknown else 0]


def _group(flow: Flow, masks: Masks, mb: int, members: PerLane) -> list[int]:
    """Return the result of a group operation: each participating lane affects all."""
    named = members if np.ndim(members) == 0 else ALL
    return [mb if _any(flow, masks) & mb & named else 0] * len(flow.targets)


def _product(flow: Flow, masks: Masks, mb: int) -> list[int]:
    """mma.sync: an element of A reaches its row of D, one of B its column, one of C itself.

    Lane 4 g + i holds rows g of A and, of 16 rows in every other register, g + 8; column g of B;
    columns 2 i and 2 i + 1 of D, in one register or, of 32 bits and more each, in two. What follows
    C, metadata and scale factors, is taken to reach all of D.
    """
    counts = [len(x.items) if isinstance(x, Vec) else 1 for x in flow.instr.operands[1:4]]
    ends = np.cumsum(counts)
    eight_rows = any(part.startswith("m8n8") for part in flow.instr.parts)
    if eight_rows and flow.instr.type[0] == "f" and flow.instr.type != "f64":  # four products
        return _to_all(flow, ALL if _any(flow, masks) else 0)
    if _union(masks, flow.sources[ends[2] :]):
        return _to_all(flow, ALL)
    lanes_in = [bits_mask(lanes_of(masks.get(name, 0))) for name in flow.sources[: ends[2]]]
    a, b, c = np.split(np.array(lanes_in).reshape(-1, 8, 4), ends[:2])
    d_count, halves = len(flow.targets), 1 if eight_rows else 2
    rows = np.any(a.reshape(-1, halves, 8, 4), axis=(0, 3))  # [half, g]
    columns = b.any(axis=(0, 2)).reshape(4, 2)  # [i, which of the two]
    reached = rows[:, None, :, None] | columns.T[None, :, None, :]  # [half, which, g, i]
    if d_count == halves:
        reached = np.any(reached, axis=1)
    lanes = [mask_bits(x.ravel()) for x in reached.reshape(d_count, 8, 4) | c]
    wide = zip(flow.targets, lanes, strict=True)
    return [both_halves(mask) if name in flow.wide else mask for name, mask in wide]


def _transposed(flow: Flow, masks: Masks, mb: int) -> list[int]:
    """movmatrix: two elements a lane, eight a row."""
    elements = np.repeat(bits_mask(masks.get(flow.sources[0], 0) & ALL), 2).reshape(8, 8)
    return [mask_bits(np.any(elements.T.reshape(32, 2), axis=1))]


RULES: dict[str, Callable[..., list[int]]] = {
    "values": _values,
    "halves": _halves,
    "pack": _pack,
    "unpack": _unpack,
    "select": _select,
    "mask": _mask,
    "shuffle": _shuffle,
    "vote": _vote,
    "group": _group,
    "product": _product,
    "transposed": _transposed,
}


class Registers:
    """masks: as above, of the registers that are not defined in all lanes; mostly empty.
    origins: by the same names, the code of where the data comes from.

    Of the instruction that is running: loaded, codes [row, lane] that memory gave, rows being equal
    parts of what a lane reads; stored, the same of what it writes, and `landed` whether that was
    any memory but global.
    """

    __slots__ = ("masks", "origins", "loaded", "stored", "landed", "local")

    def __init__(self) -> None:
        self.masks: dict[str, int] = {}
        self.origins: dict[str, int] = {}
        self.loaded: np.ndarray | None = None
        self.stored: np.ndarray | None = None
        self.landed = False
        self.local: np.ndarray | None = None  # codes of local memory, [lane, byte]

    def begin(self) -> None:
        """An instruction that accesses memory."""
        self.loaded = self.stored = None
        self.landed = False

    def set(self, name: str | None, mask: int, mb: int, origin: int) -> None:
        """A register is written in lanes `mb`."""
        if name is None:
            return
        active = both_halves(mb)
        kept = self.masks.get(name, 0) & ~active
        mask &= active
        if mask:
            self.origins[name] = origin
        if kept | mask:
            self.masks[name] = kept | mask
        else:
            self.masks.pop(name, None)

    def clear(self, names: Iterable[str | None], mb: int) -> None:
        """Registers are written with defined data in lanes `mb`."""
        for name in names:
            if name in self.masks:
                self.set(name, 0, mb, 0)

    def keep(self, names: frozenset[str], mb: int) -> None:
        """Clear registers of lanes `mb` except `names`; no other will be read again."""
        self.clear([name for name in self.masks if name not in names], mb)

    def undefined(self, name: str | None, mb: int) -> bool:
        return name is not None and lanes_of(self.masks.get(name, 0)) & mb != 0

    # -- memory -------------------------------------------------------------------------------

    def load(self, lanes: np.ndarray | slice, codes: np.ndarray) -> None:
        """Memory gave `lanes` undefined data: codes [row, lane], or one column for all."""
        if self.loaded is None:
            self.loaded = np.zeros((len(codes), 32), CODE)
        self.loaded[:, lanes] = codes

    def take_loaded(self, flow: Flow, mb: int) -> None:
        """Assign the loaded codes to the target registers."""
        if self.loaded is None or not flow.targets:
            self.clear(flow.targets, mb)
            return
        parts = 2 if flow.element_bytes >= 8 else 1
        count = parts * len(flow.targets)
        if flow.kind == "load matrix":
            codes = _from_matrix(self.loaded, count, flow.instr.parts)
        else:
            codes = rescale(self.loaded, count)
        for k, name in enumerate(flow.targets):
            rows = codes[parts * k : parts * (k + 1)]
            low, high = mask_bits(rows[0] != 0), mask_bits(rows[-1] != 0)
            mask = low | high << 32 if name in flow.wide else low | high
            self.set(name, mask, mb, int(rows.max()))

    def codes_of(self, flow: Flow, mb: int) -> np.ndarray | None:
        """Return the codes a store would write, [row, lane], or None if all data is defined."""
        if not any(self.undefined(name, mb) for name in flow.sources):
            return None
        parts = 2 if flow.element_bytes >= 8 else 1
        rows = []
        for name in flow.sources:
            mask, origin = self.masks.get(name or "", 0), self.origins.get(name or "", 0)
            halves = (mask & ALL, mask >> 32) if name in flow.wide else (mask, mask)
            rows += [bits_mask(half & mb) * CODE(origin) for half in halves[:parts]]
        codes = np.array(rows, CODE)
        if flow.kind == "store matrix":
            of = flow.instr.parts
            elements = _bytes_stored(codes) if "b8" in of else _stored(codes, "trans" in of)
            return _to_rows(elements)
        if flow.kind == "atomic":
            codes[:] = codes.max()  # lanes act one after the other, maybe on one word
        return codes

    # -- local memory -------------------------------------------------------------------------

    def local_codes(self, nbytes: int, size: int) -> np.ndarray:
        """[lane, element, byte of it]."""
        if self.local is None or self.local.shape[1] < nbytes:
            local = np.full((32, nbytes), NEVER, CODE)
            if self.local is not None:
                local[:, : self.local.shape[1]] = self.local
            self.local = local
        return self.local.reshape(32, -1, size)


def _from_matrix(codes: np.ndarray, count: int, parts: tuple[str, ...]) -> np.ndarray:
    """ldmatrix: codes of rows [part, matrix and row] -> of registers [matrix, lane]."""
    pairs = rescale(codes, 8)[:, : 8 * count].T
    if "m8n8" not in parts:
        return _from_byte_matrix(pairs, count, parts)
    elements = pairs.reshape(count, 8, 8)
    if "trans" in parts:
        elements = elements.transpose(0, 2, 1)
    return elements.reshape(count, 32, 2).max(2)


def _from_byte_matrix(pairs: np.ndarray, count: int, parts: tuple[str, ...]) -> np.ndarray:
    """Return element codes as `_from_matrix`, for 16 elements in a row.

    An element has bits of one or two 16-bit parts. pairs: codes [row, 16-bit part].
    """
    bits = {"b6x16_p32": 6, "b4x16_p64": 4}.get(parts[-1], 8)
    start = np.arange(16) * bits
    elements = np.maximum(pairs[:, start // 16], pairs[:, (start + bits - 1) // 16])
    if "trans" in parts:
        elements = elements.reshape(-1, 16, 2, 8).transpose(0, 2, 3, 1)
    return elements.reshape(count, 32, 4).max(2)


def _stored(codes: np.ndarray, transposed: bool) -> np.ndarray:
    """stmatrix: codes of registers [matrix, lane] -> of elements [matrix, row, element]."""
    elements = np.repeat(codes, 2, axis=1).reshape(len(codes), 8, 8)
    return elements.transpose(0, 2, 1) if transposed else elements


def _bytes_stored(codes: np.ndarray) -> np.ndarray:
    """Return codes stored as b8, for pairs of elements: byte m of row r is of lane 4 (m % 8) + r
    / 2."""
    pairs = codes.reshape(-1, 4, 2, 4).max(2)  # [matrix, pair of them, lane % 4]
    return np.tile(np.repeat(pairs.transpose(0, 2, 1), 2, axis=1), (1, 1, 2))


def _to_rows(elements: np.ndarray) -> np.ndarray:
    """[element, matrix and row]."""
    out = np.zeros((8, 32), CODE)
    out[:, : 8 * len(elements)] = elements.reshape(-1, 8).T
    return out


Extent = tuple[str, int, int]  # a space, its first and last unit

_MISSING = "a write of that memory, or a wait for it, before the read"
_BRANCHES = ("bra", "exit", "ret")


class Origins:
    """Origins of undefined data, and findings at the places it reaches."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._reads: list[tuple[int, Access]] = []  # code n stands for number n - 1; with its site
        self._code_of: dict[int, int] = {}

    def named(self, codes: np.ndarray, site: int, agent: str, extent: Extent) -> np.ndarray:
        """Codes with a new origin, this read, for what was never written."""
        if not (codes == NEVER).any():
            return codes
        return np.where(codes == NEVER, CODE(self._origin(site, agent, extent)), codes)

    def _origin(self, site: int, agent: str, extent: Extent) -> int:
        """The code of a read of memory that nothing wrote."""
        if site not in self._code_of:
            space, first, last = extent
            instr = self._findings.sites[site]
            read = Access(agent, instr.opcode, "read", space, first, last, **place_of(instr))
            self._reads.append((site, read))
            self._code_of[site] = len(self._reads)
        return self._code_of[site]

    def reached(self, agent: str, site: int, code: int, sink: str) -> None:
        """Report undefined data at a place it must not reach, once per origin and sink."""
        if not self._findings.new("undefined", code, sink):
            return
        read_at, read = self._reads[code - 1]
        instr = self._findings.sites[site]
        use = Access(agent, instr.opcode, "use", "", **place_of(instr))
        self._findings.report(
            Finding(
                "uninitialised",
                f"{sink} gets data that {read.role} read and nothing wrote",
                **place_of(instr),
                accesses=(read, use),
                missing=_MISSING,
                rule=registry.match(self._findings.sites[read_at]).form.section,
            )
        )

    def branches(self, site: int) -> bool:
        return self._findings.sites[site].root in _BRANCHES


class Padding:
    """Loads of undefined data into registers that no instruction reads.

    A compiler loads four words where a structure has three.
    """

    def __init__(self, sites: Sequence[Instr]) -> None:
        self._sites = sites
        self._answers: dict[tuple[int, bytes], bool] = {}
        self._used: dict[tuple[int, int], int] = {}

    @cached_property
    def _named(self) -> Counter[str]:
        """How often instructions name each register."""
        operands = ((*instr.operands, instr.guard) for instr in self._sites)
        return Counter(name for each in operands for operand in each for name in names(operand))

    def takes(self, site: int, codes: np.ndarray) -> bool:
        """Whether only such registers get undefined data; codes: as for `Registers.load`."""
        key = site, codes.tobytes()
        if key not in self._answers:
            self._answers[key] = self._takes(site, codes)
        return self._answers[key]

    def used_bytes(self, site: int, nbytes: int) -> int:
        """Return how many of the bytes that a load has are before those of registers that no
        instruction reads."""
        if (site, nbytes) not in self._used:
            instr, used = self._sites[site], nbytes
            targets = instr.operands[0] if instr.root == "ld" else None
            if isinstance(targets, Vec) and nbytes % len(targets.items) == 0:
                each, used = nbytes // len(targets.items), 0
                for number, target in enumerate(targets.items, 1):
                    if any(self._named[name] > 1 for name in names(target)):
                        used = number * each
            self._used[site, nbytes] = used
        return self._used[site, nbytes]

    def _takes(self, site: int, codes: np.ndarray) -> bool:
        instr = self._sites[site]
        targets = instr.operands[0] if instr.root == "ld" else None
        if not isinstance(targets, Vec) or len(codes) % len(targets.items):
            return False
        undefined: list[bool] = np.any(rescale(codes, len(targets.items)), axis=1).tolist()
        found = (names(target) for target in compress(targets.items, undefined))
        return all(self._named[name] == 1 for target in found for name in target)


class RegisterFlow:
    """The `codegen.tainted.Follower` of a warp. flows: of the program's instructions, by site."""

    def __init__(self, w: Warp, flows: dict[int, Flow], origins: Origins, padding: Padding) -> None:
        self.registers = Registers()
        self.masks = self.registers.masks
        self.following = False
        self._w = w
        self._flows = flows
        self._origins = origins
        self._padding = padding

    def flow(self, sites: tuple[int, ...], mb: int, *values: object) -> None:
        registers, masks = self.registers, self.masks
        for site in sites:
            flow = self._flows[site]
            for metadata in flow.watched:
                lanes = mb & metadata_lanes(flow.instr) if flow.sink == METADATA else mb
                self._watch(site, metadata, lanes, flow.sink)
            sources = [name for name in flow.sources if name in masks]
            if sources:
                news = RULES[flow.kind](flow, masks, mb, *values)
                origin = registers.origins[sources[0]]
                for name, new in zip(flow.targets, news, strict=True):
                    registers.set(name, new, mb, origin)
            elif masks:
                registers.clear(flow.targets, mb)

    def flow_in(self, site: int, mb: int) -> None:
        flow, registers = self._flows[site], self.registers
        registers.begin()
        if self.masks:
            for name in flow.watched:
                self._watch(site, name, mb, flow.sink)
            registers.stored = registers.codes_of(flow, mb)

    def flow_out(self, site: int, mb: int) -> None:
        flow, registers = self._flows[site], self.registers
        if registers.stored is not None and not registers.landed:
            code = int(registers.stored.max())
            self._origins.reached(self._w.label, site, code, "global memory")
        registers.take_loaded(flow, mb)
        registers.begin()

    def flow_guard(self, site: int, name: str, mb: int) -> None:
        branch = self._origins.branches(site)
        self._watch(site, name, mb, "a branch" if branch else "the predicate of an instruction")

    def keep(self, names: frozenset[str], mb: int) -> None:
        self.registers.keep(names, mb)

    def _watch(self, site: int, name: str, mb: int, sink: str) -> None:
        if self.registers.undefined(name, mb):
            self._origins.reached(self._w.label, site, self.registers.origins[name], sink)
            self.registers.clear([name], mb)  # what follows from it has the same cause

    def used_bytes(self, nbytes: int) -> int:
        """Return how many of the bytes that the instruction loads may be used; the others are only
        padding."""
        return nbytes if self.following else self._padding.used_bytes(self._w.at, nbytes)

    def load(self, lanes: np.ndarray | slice, codes: np.ndarray, extent: Extent) -> None:
        """The instruction reads undefined data: codes [row, lane]."""
        w = self._w
        if not self.following:
            if self._padding.takes(w.at, codes):
                return
            raise UndefinedRead
        self.registers.load(lanes, self._origins.named(codes, w.at, w.label, extent))
