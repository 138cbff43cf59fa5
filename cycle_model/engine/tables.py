"""Tables of the engine, made from bound warps and the parameters of a GPU."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cycle_model.binding import symbols as y
from cycle_model.binding.bound import BoundWarp
from cycle_model.binding.target import Landmark
from cycle_model.engine import layout as L
from cycle_model.engine import settings
from cycle_model.parameters.parameter import Gpu
from cycle_model.sass.flow import Function, Instruction
from ptxemu.record import recording as r
from ptxemu.record.recording import Access, Barrier, Event, Recording

# Which pipe executes an opcode, for how long it is busy, when the result is there: as names of
# parameters, so that one table serves all GPUs.


class Cost(NamedTuple):
    """Cost of an instruction.

    Attributes:
        pipe: Pipe of `engine.layout`.
        issue: Name of the parameter with the issue time; "" for none.
        latency: Name of the parameter with the latency; "" for none.
    """

    pipe: int
    issue: str
    latency: str


def _costs(pipe: int, issue: str, latency: str, words: str) -> dict[str, Cost]:
    return dict.fromkeys(words.split(), Cost(pipe, issue, latency))


PLAIN = Cost(L.NO_PIPE, "", "latency_plain")
ALU = Cost(L.ALU, "issue_alu", "latency_alu")
UNIFORM = Cost(L.UNIFORM, "issue_uniform", "latency_uniform")
COSTS = {
    **_costs(L.FMA, "issue_fma", "latency_fma", "FFMA FADD FMUL HFMA2 HADD2 HMUL2"),
    **_costs(L.FMA, "issue_fma2", "latency_fma", "FFMA2 FADD2 FMUL2"),
    **_costs(L.FMA, "issue_imad", "latency_fma", "IMAD"),
    **_costs(L.SPECIAL, "issue_special", "latency_special", "MUFU"),
    **_costs(L.SPECIAL, "issue_convert", "latency_special", "F2F I2F F2I FRND POPC FLO BREV"),
    **_costs(L.ALU, "issue_pack", "latency_alu", "F2FP"),
    **_costs(L.ALU, "issue_alu", "latency_vote", "VOTE VOTEU R2UR ELECT MATCH"),
    **_costs(L.TENSOR, "issue_tensor", "latency_tensor", "HMMA QMMA OMMA IMMA DMMA"),
    **_costs(L.MEMORY, "issue_access", "latency_plain", "LDS STS LDSM STSM STL LDGSTS LDG LD"),
    **_costs(L.MEMORY, "issue_access", "global_latency_l1", "LDL"),
    **_costs(L.MEMORY, "issue_access", "latency_plain", "STG ST STAS REDAS"),
    **_costs(L.MEMORY, "issue_access", "latency_atomic_shared", "ATOMS"),
    **_costs(L.MEMORY, "issue_access", "latency_atomic_global", "ATOM ATOMG RED REDG"),
    **_costs(L.MEMORY, "issue_shuffle", "latency_shuffle", "SHFL"),
    **_costs(L.MEMORY, "issue_reduce", "latency_shuffle", "REDUX CREDUX"),
    **_costs(L.NO_PIPE, "", "latency_constant", "LDC LDCU ULDC"),
    **_costs(L.NO_PIPE, "", "latency_special_register", "S2R S2UR CS2R"),
    **_costs(L.NO_PIPE, "", "latency_tensor_allocation", "UTCATOMSWS"),
    **_costs(L.NO_PIPE, "", "latency_membar", "MEMBAR"),
    **_costs(L.NO_PIPE, "", "", "BRA BRX JMP JMX CALL RET"),
    **dict.fromkeys(
        "NOP BSSY BSYNC WARPSYNC DEPBAR LDGDEPBAR ERRBAR CGAERRBAR CCTL FENCE EXIT ACQBULK PREEXIT"
        " UTMACCTL UTMALDG UTMASTG UTMAREDG UBLKCP UBLKRED UTCBAR UTCCP UTCHMMA UTCQMMA UTCOMMA"
        " SYNCS BAR UTMACMDFLUSH UCGABAR_ARV UCGABAR_WAIT NANOSLEEP UVIRTCOUNT USETMAXREG"
        " HGMMA QGMMA IGMMA BGMMA WARPGROUP WARPGROUPSET ARRIVES UGETNEXTWORKID LDTM STTM".split(),
        PLAIN,
    ),
}


def cost_of(item: Instruction) -> Cost:
    """Return the cost; an unlisted instruction uses the uniform pipe if uniform, else the ALU."""
    if item.opcode.startswith(("IMAD.MOV", "IMAD.U32", "IMAD.SHL")):
        return Cost(L.FMA, "issue_fma", "latency_fma")
    if item.word == "MEMBAR" and not item.opcode.endswith(".CTA"):
        return Cost(L.NO_PIPE, "", "latency_membar_gpu")
    found = COSTS.get(item.word)
    if found is not None:
        return found
    return UNIFORM if item.word.startswith("U") else ALU


_RATES = {
    "tma_row",
    "tma_write",
    "tma_store_row",
    "tmem_load_rate",
    "tmem_store_rate",
    "dsmem_rate",
}
_RATES |= {"l2_bytes_per_cycle", "hbm_bytes_per_cycle", "hbm_bytes_written_per_cycle"}
_RATES |= {"smem_bytes_per_cycle", "l2_bytes_written_in_all"}
LINE, LANES = 128, 32
ACCESSES = 16  # that an SM typically has under way
_SHORTEST_MMA = 18  # cycles, of what SA has measured


@dataclass(frozen=True)
class Sharing:
    """Resources that the simulated warps share with the rest of the GPU.

    Attributes:
        active_sms: Number of SMs of the whole GPU that share the memory.
        writes_back: Whether writes reach memory in the long run; else they stay in L2.
        grid_release: Cycle from which nobody waits for the preceding grids.
    """

    active_sms: int
    writes_back: bool = False
    grid_release: int = 0


def settings_of(gpu: Gpu, sharing: Sharing) -> np.ndarray:
    """Return the vector that routines read; rates are those of one SM."""
    values = []
    for name in settings.NAMES:
        if name == "grid_release":
            values.append(sharing.grid_release)
            continue
        value = gpu.value(name)
        active = max(min(sharing.active_sms, gpu.sms), 1)
        if name == "hbm_bytes_per_cycle":
            value /= active
        elif name == "hbm_bytes_written_per_cycle":
            value = value / active if sharing.writes_back else 0
        elif name.startswith("commit_latency"):  # published to the end of a wait
            value = max(value - gpu.value("mma_issue") - gpu.value("mbarrier_wake"), 0)
        elif name == "l2_bytes_per_cycle":
            value = min(value, gpu.value("l2_bytes_in_all") / active)
        elif name == "l2_bytes_written_in_all":
            value = min(value / active, gpu.value("l2_bytes_per_cycle"))
        elif name == "global_latency_hbm":  # a wait for many loads ends with the slowest
            value += gpu.value("hbm_tail") * math.log(active * ACCESSES)
        values.append(round(value * L.PART) if name in _RATES else round(value))
    return np.array(values, np.int64)


def code_of(function: Function, gpu: Gpu) -> np.ndarray:
    """The table of instructions."""
    table = np.zeros((len(function.instructions), L.CODE_WORDS), np.int64)
    sectors: dict[tuple[str, int], int] = {}
    for row, item in zip(table, function.instructions, strict=True):
        cost, control = cost_of(item), item.control
        row[L.KIND] = _kind(item)
        row[L.PIPE] = cost.pipe
        row[L.OCCUPANCY] = round(gpu.value(cost.issue)) if cost.issue else 0
        row[L.LATENCY] = round(gpu.value(cost.latency)) if cost.latency else 1
        row[L.STALL] = control.stall
        row[L.WRITES], row[L.READS], row[L.WAITS] = control.writes, control.reads, control.waits
        row[L.REGISTERS] = item.repetition
        row[L.YIELDS] = control.yields
        row[L.SECTOR] = _sector(item, sectors)
    return table


_PARAMETER = re.compile(r"\bc\[0x0\]\[(U?R\w+\+)?(0x[0-9a-f]+)\]")
_SECTOR = 32  # bytes


def _sector(item: Instruction, sectors: dict[tuple[str, int], int]) -> int:
    """Return the number, from 1, of the parameter sector that an instruction reads; 0 for none.

    An address in another register counts as another sector.
    """
    found = _PARAMETER.search(item.operands)
    if not found:
        return 0
    place = found[1] or "", int(found[2], 16) // _SECTOR
    return sectors.setdefault(place, min(len(sectors), L.PARAMETER_SECTORS - 1) + 1)


def _kind(item: Instruction) -> int:
    if item.word == "LDTM":
        return L.TMEM_LOAD
    if item.word == "STTM":
        return L.TMEM_STORE
    if item.word == "ACQBULK":
        return L.GRID_WAIT
    return L.TMEM_STORE_WAIT if item.opcode.startswith("FENCE.VIEW.ASYNC.T") else L.PLAIN


@dataclass(frozen=True)
class Placed:
    """A warp to simulate.

    Attributes:
        sm: SM in the simulation.
        cta: Number of the CTA in the simulation, from 0.
        cluster: Number of the cluster in the simulation, from 0.
        far: Whether an address it reads comes from the memory behind L2.
        alone: Share of a read that L2 serves for this warp alone, if neighbours read it as well.
    """

    warp: BoundWarp
    sm: int
    cta: int
    cluster: int
    far: Callable[[int], bool]
    alone: Callable[[int], float] = lambda address: 1.0


class Tables:
    """Tables of warps that run together."""

    def __init__(
        self, recording: Recording, function: Function, warps: Sequence[Placed], gpu: Gpu,
        least_asked: float = 1.0,
    ) -> None:  # fmt: skip
        """least_asked: the share of a read that L2 is busy with where everybody asks for it."""
        self.recording, self.function, self.gpu = recording, function, gpu
        self.placed = warps
        self._least_asked = least_asked
        self._barriers: dict[tuple[int, Barrier], int] = {}
        self._events: list[tuple[int, ...]] = []
        self._signals: list[tuple[int, int, int, int]] = []
        self._words = [item.word for item in function.instructions]
        self._guarded = np.array([bool(item.guard) for item in function.instructions])
        self._kinds = np.array([_access_kind(item) for item in function.instructions], np.int8)
        self.path = np.concatenate([each.warp.path for each in warps]).astype(np.int32)
        self.numbers = np.full(len(self.path) + 1, -1, np.int32)
        self.ends = np.cumsum([len(each.warp.path) for each in warps])
        for each, end in zip(warps, self.ends.tolist(), strict=True):
            begin = end - len(each.warp.path)
            self._add_landmarks(each, begin)
            self._add_accesses(each, begin)
        self.events = np.array(self._events or [(0,) * L.EVENT_WORDS], np.int64)
        self.signals = np.array(self._signals or [(0, 0, 0, 0)], np.int64)

    @property
    def barriers(self) -> dict[tuple[int, Barrier], int]:
        """(cluster, rank and offset) -> number."""
        return self._barriers

    # -- landmarks --------------------------------------------------------------------------

    def _add_landmarks(self, each: Placed, begin: int) -> None:
        for landmark, at in zip(each.warp.landmarks, each.warp.at.tolist(), strict=True):
            if self._words[each.warp.path[at]] == "NOP":
                continue  # an edit has dropped it
            row = self._event_of(each, landmark, int(each.warp.path[at]))
            if row is not None:
                self.numbers[begin + at] = len(self._events)
                self._events.append(row)

    def _event_of(self, each: Placed, landmark: Landmark, item: int) -> tuple[int, ...] | None:
        name = landmark.name
        if name.startswith("tmem"):
            return None
        site = self.recording.sites[landmark.site]
        make = _MAKERS.get(name)
        if make is None:
            return None
        return make(self, each, landmark, site, self.function.instructions[item])

    def _row(
        self, what: int, *values: int, signals: Sequence[tuple[int, int, int, int]] = ()
    ) -> tuple[int, ...]:
        first = len(self._signals)
        self._signals.extend(signals)
        a, b, c, d = (*values, 0, 0, 0, 0)[:4]
        return what, first, len(signals), a, b, c, d, 0

    def _told(self, each: Placed, event: Event, *, tx: bool) -> list[tuple[int, int, int, int]]:
        """Signals of an event: of arrivals, or of bytes."""
        told = []
        for barrier, amount in event.signals:
            number = self._barriers.setdefault((each.cluster, barrier), len(self._barriers))
            if number >= L.MOST_BARRIERS:
                raise ValueError(f"more than {L.MOST_BARRIERS} mbarriers at a time")
            remote = int(barrier[0] != each.warp.record.rank)
            told.append((number, 0 if tx else amount, amount if tx else 0, remote))
        return told

    # -- accesses ---------------------------------------------------------------------------

    def _add_accesses(self, each: Placed, begin: int) -> None:
        """Assign recorded accesses of each kind, in order, to those of the path.

        If the compiler joined or split accesses, they are assigned in proportion.
        """
        path = each.warp.path
        kinds = self._kinds[path]
        if not kinds.any():
            return
        recorded: dict[int, list[Access]] = {}
        held: set[tuple[int, int]] = set()
        for access in each.warp.record.accesses():
            kind = _ACCESS_KINDS[access.memory, access.store]
            recorded.setdefault(kind, []).append(access)
        if len(recorded.get(1, ())) <= np.count_nonzero(self._words_are(path, "LDG")):
            kinds = np.where(self._words_are(path, "LD"), 3, kinds)  # from other CTAs' memory
        for kind, found in recorded.items():
            places = self._executed(path, np.flatnonzero(kinds == kind), len(found))
            for number, at in enumerate(places.tolist()):
                access = found[number * len(found) // len(places)]
                row = self._access_row(each, access, self.function.instructions[path[at]], held)
                if row is not None and self.numbers[begin + at] < 0:
                    self.numbers[begin + at] = len(self._events)
                    self._events.append(row)

    def _words_are(self, path: np.ndarray, word: str) -> np.ndarray:
        """Return a mask of the path's instructions whose opcode begins with `word`."""
        return np.array([each == word for each in self._words], bool)[path]

    def _executed(self, path: np.ndarray, places: np.ndarray, count: int) -> np.ndarray:
        """Return the places of a path's accesses that were executed.

        The recording does not show which guarded accesses were skipped. The model skips the last
        ones, as they would exceed the data.
        """
        guarded = np.flatnonzero(self._guarded[path[places]])
        excess = len(places) - count
        return np.delete(places, guarded[-excess:]) if 0 < excess <= len(guarded) else places

    def _access_row(
        self, each: Placed, access: Access, item: Instruction, held: set[tuple[int, int]]
    ) -> tuple[int, ...] | None:
        """held: sectors that L1 has, as far as this warp has asked for them."""
        word = item.word
        if access.memory == "shared" and word == "LD":
            return self._row(L.E_REMOTE, LANES * access.nbytes)
        if access.memory == "shared":
            extra = access.passes - 1
            return self._row(L.E_SHARED, extra) if extra > 0 or word == "LDS" else None
        if access.memory == "copied":
            far = int(each.far(access.first))
            asked = self._asked(each, access.first, 32 * access.passes, far)
            return self._row(L.E_COPY, asked, far, _lines(access))
        if access.store:
            return self._row(L.E_GLOBAL_STORE, min(32 * access.passes, LANES * access.nbytes))
        sectors = access.first // 32, access.passes
        if sectors in held and "STRONG" not in item.opcode:
            return self._row(L.E_GLOBAL_LOAD, 0, 2)
        held.add(sectors)
        far = int(each.far(access.first))
        asked = self._asked(each, access.first, 32 * access.passes, far)
        return self._row(L.E_GLOBAL_LOAD, asked, far, _lines(access))

    def _asked(self, each: Placed, address: int, nbytes: int, far: int) -> int:
        """Bytes of a read that the SM's share of L2 is busy with."""
        return nbytes if far else round(nbytes * max(each.alone(address), self._least_asked))


def _lines(access: Access) -> int:
    """Return the number of lines of a load that goes to L2.

    The SM looks up one line per cycle (issue_global of results/units_h100.json). Four fully used
    sectors share a line; a partly used sector is a line of its own.
    """
    whole = 32 * access.passes <= LANES * access.nbytes
    return -(-access.passes // 4) if whole else access.passes


class MmaParts(NamedTuple):
    """Times of an MMA, in parts of cycles.

    Attributes:
        next: Time until another MMA can begin.
        alone: Time in which TMA cannot write.
        tail: Time from then to the result, beyond the latency of a commit of 128 rows.
    """

    next: int
    alone: int
    tail: int


def mma_parts(gpu: Gpu, m: int, n: int, ctas: int, in_tmem: bool) -> MmaParts:
    """Return the times of an MMA of 32 bytes along K.

    Its duration is the tensor core's rate, or the operands that each SM reads from shared memory;
    a pair of SMs needs some cycles more. Where TMA fills shared memory at the same time, main
    loops need N / 4 cycles per MMA more, whatever M is (SA): TMA writes only while A is read. With
    A in tensor memory this was not measured; the model assumes that only B is read.
    """
    rows, rate = m // ctas, gpu.value("mma_smem_rate")
    compute = n / 2 if ctas == 1 or rows == 128 else n / 4
    of_a = 0 if in_tmem else 32 * rows / rate
    reads = of_a + 32 * n / ctas / rate
    if ctas == 2 and not in_tmem:
        reads += rows // 32 - 1
    cycles = max(compute, reads, _SHORTEST_MMA) + gpu.value("mma_overhead")
    usual = 0 if in_tmem else 32 * 128 / rate  # in the latency of a commit
    return MmaParts(
        round(cycles * L.PART),
        round((reads if in_tmem else max(compute - of_a, 0)) * L.PART),
        round((compute + of_a - usual - cycles) * L.PART),
    )


_ACCESS_KINDS = {
    ("global", False): 1,
    ("global", True): 2,
    ("shared", False): 3,
    ("shared", True): 4,
    ("copied", False): 5,
}
_BY_WORD = {"LDG": 1, "LD": 1, "STG": 2, "ST": 2, "LDS": 3, "LDSM": 3, "STS": 4, "STSM": 4}
_BY_WORD["LDGSTS"] = 5


def _access_kind(item: Instruction) -> int:
    return _BY_WORD.get(item.word, 0)


# -- what each landmark becomes -----------------------------------------------------------------

Maker = Callable[[Tables, Placed, Landmark, Any, Instruction], "tuple[int, ...] | None"]
_MAKERS: dict[str, Maker] = {}


def _makes(*names: str) -> Callable[[Maker], Maker]:
    def keep(make: Maker) -> Maker:
        _MAKERS.update(dict.fromkeys(names, make))
        return make

    return keep


@_makes(y.INIT)
def _init(t: Tables, each: Placed, landmark: Landmark, site: Any, item: Instruction) -> Any:
    return t._row(L.E_INIT, signals=t._told(each, landmark.events[0], tx=False))


@_makes(y.ARRIVE, y.EXPECT, y.COMPLETE)
def _arrive(t: Tables, each: Placed, landmark: Landmark, site: Any, item: Instruction) -> Any:
    """Bytes that are expected, and arrivals."""
    signals: dict[int, list[int]] = {}
    for event in landmark.events:
        for number, count, nbytes, remote in t._told(each, event, tx=event.what != r.ARRIVE):
            kept = signals.setdefault(number, [0, 0, remote])
            kept[0] += count
            kept[1] += -nbytes if event.what == r.COMPLETE else nbytes
    rows = [(number, *kept) for number, kept in signals.items()]
    return t._row(L.E_ARRIVE, signals=rows)  # type: ignore[arg-type]


@_makes(y.WAIT, y.TEST)
def _wait(t: Tables, each: Placed, landmark: Landmark, site: Any, item: Instruction) -> Any:
    return t._row(L.E_WAIT, signals=t._told(each, landmark.events[0], tx=False)[:1])


@_makes(y.LOAD)
def _load(t: Tables, each: Placed, landmark: Landmark, site: Any, item: Instruction) -> Any:
    event = landmark.events[0]
    rows, nbytes, _ = event.shape
    lines = rows * max(math.ceil(nbytes / LINE), 1)
    far = int(each.far(event.address))
    signals = t._told(each, event, tx=True)
    asked = t._asked(each, event.address, rows * nbytes, far)
    how = far + L.GATHERS if "GATHER4" in item.opcode else far
    return t._row(L.E_LOAD, lines, rows * nbytes, how, asked, signals=signals)


@_makes(y.STORE)
def _store(t: Tables, each: Placed, landmark: Landmark, site: Any, item: Instruction) -> Any:
    rows, nbytes = landmark.events[0].shape
    return t._row(L.E_STORE, rows * max(math.ceil(nbytes / LINE), 1), rows * nbytes)


@_makes(y.SEND)
def _send(t: Tables, each: Placed, landmark: Landmark, site: Any, item: Instruction) -> Any:
    event = landmark.events[0]
    signals = t._told(each, event, tx=True)
    return t._row(L.E_SEND, math.prod(event.shape), signals=signals)


@_makes(y.CANCEL)
def _cancel(t: Tables, each: Placed, landmark: Landmark, site: Any, item: Instruction) -> Any:
    return t._row(L.E_CANCEL, signals=t._told(each, landmark.events[0], tx=True))


@_makes(y.MMA)
def _mma(t: Tables, each: Placed, landmark: Landmark, site: Any, item: Instruction) -> Any:
    m, n, ctas = landmark.events[0].shape
    in_tmem = "[" in str(site.text.split(",")[1]) if site.text.count(",") else False
    cost = mma_parts(t.gpu, m, n, ctas, in_tmem)
    how = int(in_tmem) + 2 * (ctas == 2)
    return t._row(L.E_MMA, cost.next, how, cost.alone, cost.tail)


_WGMMA = re.compile(r"GMMA\.64x(\d+)x")


@_makes(y.WGMMA)
def _wgmma(t: Tables, each: Placed, landmark: Landmark, site: Any, item: Instruction) -> Any:
    """N / 2 cycles for 32 bytes along K, whatever the format. The last of a group says so."""
    found = _WGMMA.search(item.opcode)
    if found is None:
        raise ValueError(f"{item.opcode}: unknown shape of wgmma")
    in_registers = re.match(r"[^,]*,\s*R", item.operands) is not None
    latency = "wgmma_latency_registers" if in_registers else "wgmma_latency_smem"
    parts, tail = int(found[1]) * L.PART // 2, round(t.gpu.value(latency))
    return t._row(L.E_WGMMA, parts, tail, int("gsb" in item.operands))


@_makes(y.WGMMA_WAIT)
def _wgmma_wait(t: Tables, each: Placed, landmark: Landmark, site: Any, item: Instruction) -> Any:
    return t._row(L.E_GROUP_WAIT, int(site.operands[0].value), 3)


@_makes(y.FILL)
def _fill(t: Tables, each: Placed, landmark: Landmark, site: Any, item: Instruction) -> Any:
    (nbytes,) = landmark.events[0].shape
    return t._row(L.E_FILL, round(nbytes / t.gpu.value("fill_rate") * L.PART))


@_makes(y.COMMIT)
def _commit(t: Tables, each: Placed, landmark: Landmark, site: Any, item: Instruction) -> Any:
    return t._row(L.E_COMMIT, signals=t._told(each, landmark.events[0], tx=False))


@_makes(y.BULK_COMMIT)
def _bulk_commit(t: Tables, each: Placed, landmark: Landmark, site: Any, item: Instruction) -> Any:
    return t._row(L.E_BULK_COMMIT)


@_makes(y.COPY_COMMIT)
def _copy_commit(t: Tables, each: Placed, landmark: Landmark, site: Any, item: Instruction) -> Any:
    return t._row(L.E_COPY_COMMIT)


@_makes(y.GROUP_WAIT)
def _group_wait(t: Tables, each: Placed, landmark: Landmark, site: Any, item: Instruction) -> Any:
    allowed = int(site.operands[0].value) if site.operands else 0
    if "bulk" in site.parts:
        return t._row(L.E_GROUP_WAIT, allowed, int("read" in site.parts))
    return t._row(L.E_GROUP_WAIT, allowed, 2)


@_makes(y.COPY_ARRIVE)
def _copy_arrive(t: Tables, each: Placed, landmark: Landmark, site: Any, item: Instruction) -> Any:
    return t._row(L.E_COPY_ARRIVE, signals=t._told(each, landmark.events[0], tx=False))


@_makes(y.BARRIER)
def _barrier(t: Tables, each: Placed, landmark: Landmark, site: Any, item: Instruction) -> Any:
    """Return a barrier event; without a recorded event it is a cluster barrier without clusters."""
    ident, threads = landmark.events[0].shape if landmark.events else (0, 0)
    what = L.E_BARRIER_ARRIVE if "ARV" in item.opcode else L.E_BARRIER
    return t._row(what, ident, threads)


@_makes(y.CLUSTER_ARRIVE)
def _cluster_arrive(
    t: Tables, each: Placed, landmark: Landmark, site: Any, item: Instruction
) -> Any:
    return t._row(L.E_CLUSTER_ARRIVE)


@_makes(y.CLUSTER_WAIT)
def _cluster_wait(t: Tables, each: Placed, landmark: Landmark, site: Any, item: Instruction) -> Any:
    return t._row(L.E_CLUSTER_WAIT)
