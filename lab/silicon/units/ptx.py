"""PTX text of a measuring kernel: roles of warps, each a timed loop, and what a launch needs.

Bodies name registers as they like: `%r_x` and `%r7` are .b32, `%d_x` .b64, `%p_x` predicates; the
text declares what it finds. All bodies may use:

- %r_tid, %r_lane, %r_warp, %r_cta, %r_rank (of the CTA in its cluster), %r_ctas
- %r_smem (dynamic shared memory), %d_mem (the buffer), %d_map (the tensor map)
- %r_tmem (allocated tensor memory), %r_count (rounds of the loop)
- %r_never (a value that no thread id has, unknown to the compiler)
- %r_y and %r_z (opaque numbers that differ between lanes)
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

RECORD = 5  # u64 of a warp: clock before and behind, nanoseconds before and behind, SM
HOPPER, BLACKWELL = "sm_90a", "sm_100a"
VERSIONS = {HOPPER: "8.3", BLACKWELL: "8.7", "sm_103a": "8.8"}  # of PTX, by what it is for
ARCH_OF_CAPABILITY = {"9.0": HOPPER, "10.0": BLACKWELL, "10.3": "sm_103a"}
NEVER = 0x7FFFFFFF
WARP = 32
_REGISTER = re.compile(r"%([rdph])(\d+\w*|_\w+)")
_TYPES = {"r": "b32", "d": "b64", "p": "pred", "h": "b16"}


@dataclass(frozen=True)
class Role:
    """Work of some warps: `body`, repeated `count` times.

    warps: those at `first`, `first + step`, ... below `last` (0: all).
    cta: rank in the cluster, -1 for every CTA.
    begin, drain: text before and after the loop, both timed.
    inside: whether the body reads the clock itself and sums up %d_begin and %d_end.
    single: whether only one lane runs it.
    sink: registers of the body that must be computed.
    """

    body: str
    first: int = 0
    last: int = 0
    step: int = 1
    cta: int = -1
    before: str = ""
    begin: str = ""
    drain: str = ""
    inside: bool = False
    single: bool = False
    timed: bool = True
    sink: tuple[str, ...] = ()


@dataclass(frozen=True)
class Map:
    """A tensor map of bytes over the buffer: rows of `pitch` bytes, a box of (width, height).

    swizzle: "none" or "128B". height 0: as many rows as the buffer has.
    """

    width: int
    height: int
    pitch: int
    swizzle: str = "none"


@dataclass(frozen=True)
class Memory:
    """The buffer of a kernel, zeros. cold: nothing of it is in L2 when a launch begins.

    chase: a cycle of pointers through it, so many bytes apart, in an order without a pattern.
    """

    nbytes: int = 1 << 16
    cold: bool = False
    chase: int = 0


@dataclass(frozen=True)
class Kernel:
    """Roles, and the shape of the launch.

    grid: CTAs, times the number of SMs if `per_sm`.
    setup: what all threads do first, before a barrier of all participants.
    tmem: columns of tensor memory to allocate, by pairs of CTAs if clusters are pairs.
    filled: what all threads do with tensor memory before the roles begin.
    after: what all threads do when the roles have ended.
    answer: the float32 that `after` leaves in the buffer for each thread.
    answered: number of lanes of each warp with the answer.
    """

    roles: tuple[Role, ...]
    setup: str = ""
    block: int = WARP
    grid: int = 1
    cluster: int = 1
    smem: int = 0
    per_sm: bool = False
    memory: Memory = field(default_factory=Memory)
    map: Map | None = None
    module: str = ""
    after: str = ""
    tmem: int = 0
    filled: str = ""
    answer: float | None = None
    answered: int = WARP

    def text(self, arch: str = HOPPER) -> str:
        """The module, whose kernel is called `bench`."""
        pair = min(self.cluster, 2)
        parts = [_PROLOGUE, self.setup, _allocate(self.tmem, pair), _all_meet(self.cluster)]
        if self.tmem:
            parts += [_ALLOCATED, self.filled, _SEEN, _all_meet(self.cluster), _SEES]
        for number, role in enumerate(self.roles):
            parts.append(_role(role, number, self.block // WARP))
        if self.cluster > 1 or self.tmem:  # memory lives until nobody uses it any more
            parts.append(_all_meet(self.cluster))
        if self.tmem:
            parts += [_SEES, self.after, _free(self.tmem, pair)]
        code = "\n".join(part for part in parts if part)
        declared = dict.fromkeys(_REGISTER.findall(code))
        registers = "\n".join(f".reg .{_TYPES[kind]} %{kind}{name};" for kind, name in declared)
        tensor_map = ",\n.param .align 64 .b8 map[128]" if self.map else ""
        address = "mov.b64 %d_map, map;\ncvta.param.u64 %d_map, %d_map;" if self.map else ""
        declared_map = ".reg .b64 %d_map;\n" if self.map and ("d", "_map") not in declared else ""
        cluster = f".explicitcluster\n.reqnctapercluster {self.cluster}, 1, 1\n"
        limits = f".maxntid {self.block}, 1, 1\n" + cluster * (self.cluster > 1)
        return (
            f"{head(arch)}{self.module}\n"
            ".extern .shared .align 1024 .b8 smem[];\n"
            ".visible .entry bench(.param .u64 out, .param .u64 mem, .param .u32 count,\n"
            f".param .u32 never{tensor_map})\n{limits}"
            f"{{\n{registers}\n{declared_map}{address}\n{code}\nret;\n}}\n"
        )


def head(arch: str) -> str:
    """The first lines of a module for an architecture."""
    return f".version {VERSIONS[arch]}\n.target {arch}\n.address_size 64\n"


SLOT = 1016  # bytes into shared memory: where the address of tensor memory is
# The compiler has to know that a warp has one address, or each use becomes a loop over its lanes.
_ALLOCATED = f"""\
ld.shared.b32 %r_tmem, [%r_smem+{SLOT}];
shfl.sync.idx.b32 %r_tmem, %r_tmem, 0, 31, -1;
shfl.sync.idx.b32 %r_warp, %r_warp, 0, 31, -1;"""
_SEEN, _SEES = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"


def _allocate(columns: int, ctas: int) -> str:
    """Allocate in the first warp; return nothing for no columns."""
    if not columns:
        return ""
    group = f"cta_group::{ctas}.sync.aligned"
    return f"""\
setp.ne.u32 %p_not, %r_warp, 0;
@%p_not bra OTHERS;
add.u32 %r_slot, %r_smem, {SLOT};
tcgen05.alloc.{group}.shared::cta.b32 [%r_slot], {columns};
tcgen05.relinquish_alloc_permit.{group};
OTHERS:
{_SEEN}"""


def _free(columns: int, ctas: int) -> str:
    meet = f"{_SEEN}\n{_all_meet(ctas)}\n{_SEES}"
    return f"""\
{meet}
setp.ne.u32 %p_not, %r_warp, 0;
@%p_not bra FREED;
tcgen05.dealloc.cta_group::{ctas}.sync.aligned.b32 %r_tmem, {columns};
FREED:"""


_PROLOGUE = """\
ld.param.u64 %d_out, [out];
ld.param.u64 %d_mem, [mem];
ld.param.u32 %r_count, [count];
ld.param.u32 %r_never, [never];
cvta.to.global.u64 %d_out, %d_out;
cvta.to.global.u64 %d_mem, %d_mem;
mov.u32 %r_tid, %tid.x;
mov.u32 %r_lane, %laneid;
shr.u32 %r_warp, %r_tid, 5;
mov.u32 %r_cta, %ctaid.x;
mov.u32 %r_ctas, %nctaid.x;
mov.u32 %r_rank, %cluster_ctarank;
mov.u32 %r_smem, smem;
add.u32 %r_y, %r_tid, %r_never;
mul.lo.u32 %r_z, %r_y, %r_y;
mov.u32 %r_warps, %ntid.x;
shr.u32 %r_warps, %r_warps, 5;
mad.lo.u32 %r_record, %r_cta, %r_warps, %r_warp;
mad.wide.u32 %d_record, %r_record, 40, %d_out;
mov.u64 %d_begin, 0;
mov.u64 %d_end, 0;"""


def _all_meet(cluster: int) -> str:
    if cluster == 1:
        return "bar.sync 0;"
    return "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"


def _condition(role: Role, number: int, warps: int) -> str:
    """Threads of other roles jump behind this one."""
    last, away = role.last or warps, f"bra.uni END{number};"
    lines = []
    if role.first or last < warps:
        lines += [f"sub.u32 %r_w, %r_warp, {role.first};"]
        lines += [f"setp.ge.u32 %p_not, %r_w, {last - role.first};", f"@%p_not {away}"]
    if role.step > 1:
        lines += [f"sub.u32 %r_w, %r_warp, {role.first};", f"and.b32 %r_w, %r_w, {role.step - 1};"]
        lines += ["setp.ne.u32 %p_not, %r_w, 0;", f"@%p_not {away}"]
    if role.cta >= 0:
        lines += [f"setp.ne.u32 %p_not, %r_rank, {role.cta};", f"@%p_not {away}"]
    if role.single:
        lines += ["elect.sync %r_w|%p_elected, -1;", f"@!%p_elected bra END{number};"]
    return "\n".join(lines)


def _role(role: Role, number: int, warps: int) -> str:
    clock = "mov.u64 %d_{}, %clock64;"
    lines = [
        _condition(role, number, warps),
        "mov.u32 %r_i, %r_count;",
        role.before,
        "mov.u64 %d_ns0, %globaltimer;",
        "" if role.inside else clock.format("begin"),
        role.begin,
        '.pragma "nounroll";',
        f"LOOP{number}:",
        role.body,
        "sub.u32 %r_i, %r_i, 1;",
        "setp.ne.u32 %p_more, %r_i, 0;",
        f"@%p_more bra.uni LOOP{number};",
        role.drain,
        "" if role.inside else clock.format("end"),
        "mov.u64 %d_ns1, %globaltimer;",
        _STORE if role.timed else "",
        _sink(role.sink),
        f"END{number}:",
    ]
    return "\n".join(line for line in lines if line)


_STORE = """\
mov.u32 %r_sm, %smid;
cvt.u64.u32 %d_sm, %r_sm;
st.global.u64 [%d_record], %d_begin;
st.global.u64 [%d_record+8], %d_end;
st.global.u64 [%d_record+16], %d_ns0;
st.global.u64 [%d_record+24], %d_ns1;
st.global.u64 [%d_record+32], %d_sm;"""


def _sink(registers: tuple[str, ...]) -> str:
    """Stores that never happen, which the compiler cannot know."""
    if not registers:
        return ""
    store = "@%p_sink st.global.u{} [%d_record], {};"
    bits = {"%r": 32, "%d": 64}
    stores = [store.format(bits[name[:2]], name) for name in registers]
    return "\n".join(["setp.eq.u32 %p_sink, %r_tid, %r_never;", *stores])
