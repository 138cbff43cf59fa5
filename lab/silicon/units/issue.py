"""Groups 1 to 3: issue rates, dependent chains, tensor cores, branches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lab.silicon.units.benchmark import CYCLES, PER_SM, PER_WARP, Benchmark, Point
from lab.silicon.units.instructions import INSTRUCTIONS, Instruction
from lab.silicon.units.ptx import HOPPER, WARP, Kernel, Role

SCHEDULERS = 4
COUNT = 64  # rounds of a loop of instructions
PAGE = 1024  # bytes between the accesses of a loop


def _names(chain: int, step: int, chains: int) -> dict[str, object]:
    turn = step // chains % 2
    x, w = f"%r{100 + 2 * chain + turn}", f"%r{100 + 2 * chain + 1 - turn}"
    return {
        "x": x, "w": w, "v": f"%r{100 + 2 * chain}", "k": step, "n": chain,
        "c": chain, "d": (chain + 1) % max(chains, 2), "o": step % 31 * PAGE,
    }  # fmt: skip


def _start(one: Instruction, chains: int) -> str:
    """Both registers of each chain, and a partner of the 64-bit ones."""
    lines = []
    for chain in range(max(chains, 2)):
        for turn in range(2):
            lines.append(one.start.format(x=f"%r{100 + 2 * chain + turn}", n=chain))
    return "\n".join(lines)


def kernel(one: Instruction, steps: int, chains: int, warps: int, schedulers: int) -> Kernel:
    """Return a kernel with `steps` steps of the instruction in a loop, on `warps` warps of each
    of some schedulers."""
    body = "\n".join(
        one.text.format(**_names(step % chains, step, chains)) for step in range(steps)
    )
    sink = [f"%r{100 + 2 * c + t}" for c in range(chains) for t in range(2)] if one.sunk else []
    if "%d{c}" in one.text:
        sink += [f"%d{chain}" for chain in range(chains)]
    sink += [f"%r_{letter}{step}" for letter in one.results for step in range(steps)]
    before = _start(one, chains) if one.sunk else ""
    module = ".const .align 4 .b32 table[64];" if "table" in one.start else ""
    apart = SCHEDULERS // schedulers  # warp w is on scheduler w % 4
    role = Role(f"{body}\n{one.tail}", step=apart, before=before, sink=tuple(sink))
    return Kernel((role,), one.setup, WARP * SCHEDULERS * warps, smem=one.smem, module=module)


def issue() -> Iterator[Benchmark]:
    """Independent instructions of 1, 2 and 4 warps of one scheduler; of all schedulers where a unit
    serves the whole SM."""
    for name, one in INSTRUCTIONS.items():
        if not one.issue:
            continue
        for schedulers in (1, SCHEDULERS) if one.sm_wide else (1,):
            for warps in (1, 2, 4):
                points = tuple(
                    Point(kernel(one, steps, one.chains, warps, schedulers), COUNT,
                          COUNT * steps * one.per_step * warps * schedulers)
                    for steps in (one.steps, 2 * one.steps)
                )  # fmt: skip
                variant = {"instruction": name, "sass": one.sass, "warps": warps,
                           "schedulers": schedulers}  # fmt: skip
                unit = PER_WARP if schedulers == 1 else PER_SM
                yield Benchmark("issue", "issue", variant, unit, points, arch=one.arch)


def latency() -> Iterator[Benchmark]:
    """Each step needs the one before."""
    for name, one in INSTRUCTIONS.items():
        if not one.latency:
            continue
        points = tuple(
            Point(kernel(one, steps, 1, 1, 1), COUNT, COUNT * steps * one.per_step)
            for steps in (one.latency_steps, 2 * one.latency_steps)
        )
        variant = {"instruction": name, "sass": one.sass}
        yield Benchmark("latency", "latency", variant, CYCLES, points, arch=one.arch)


# -- branches -------------------------------------------------------------------------------------

FMA = "fma.rn.f32 %r100, %r100, %r_y, %r_z;"


def branches() -> Iterator[Benchmark]:
    """A loop whose body is so many dependent FMAs, beside as many without a branch: two points that
    differ in rounds, cycles per round."""
    for fmas in (1, 4, 16, 64):
        made = Kernel(
            (Role("\n".join([FMA] * fmas), before="mov.b32 %r100, %r_y;", sink=("%r100",)),)
        )
        points = tuple(Point(made, count, count) for count in (512, 1024))
        yield Benchmark("branch", "loop", {"fmas": fmas}, "cycles per round", points)
    for taken in (True, False):
        for word in ("bra.uni", "bra"):
            points = tuple(
                Point(_jumps(word, steps, taken=taken), COUNT, COUNT * steps) for steps in (16, 32)
            )
            variant = {"branch": word, "taken": taken, "beside": "a store to shared memory"}
            yield Benchmark("branch", "branch", variant, CYCLES, points)


NO_SQUARE = 1000002  # a square is 0 or 1 modulo 4


def _jumps(word: str, steps: int, *, taken: bool) -> Kernel:
    """A store before each branch, which stays where it is. Taken: over stores that never happen;
    not taken: back to the loop's first instruction, which the compiler expects to be rare."""
    body = []
    for step in range(steps):
        body.append(f"st.volatile.shared.b32 [%r_smem+{4096 + 4 * step}], %r_y;")
        if taken:
            body.append(f"@%p_jump {word} OVER{step};")
            body += [
                f"st.volatile.shared.b32 [%r_smem+{64 * step + 4 * i}], %r_z;" for i in range(12)
            ]
            body.append(f"OVER{step}:")
        else:
            body.append(f"setp.eq.u32 %p_jump, %r_square, {NO_SQUARE + 4 * step};")
            body.append(f"@%p_jump {word} LOOP0;")
    setup = "setp.ge.u32 %p_jump, %r_never, %r_count;\nmul.lo.u32 %r_square, %r_never, %r_never;"
    return Kernel((Role("\n".join(body)),), setup, smem=8192)


# -- wgmma ----------------------------------------------------------------------------------------

PATTERN = 1 << 62 | (1024 >> 4) << 32 | 1 << 16  # 128-byte swizzle, K-major


def wgmma_kernel(n: int, *, registers: bool, steps: int, groups: int) -> Kernel:
    """Issue `steps` m64nNk16 per commit, along K; a wait for all of them ends the round."""
    accumulators = ", ".join(f"%r{i}" for i in range(n // 2))
    lines = ["wgmma.fence.sync.aligned;"]
    for step in range(steps):
        a = f"{{{', '.join(f'%r_f{i}' for i in range(4))}}}" if registers else f"%d_a{step % 4}"
        last = "0" if registers else "0, 0"
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{accumulators}}}, {a},"
            f" %d_b{step % 4}, %p_one, 1, 1, {last};"
        )
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    before = ["setp.ne.u32 %p_one, %r_never, 0;"]
    before += [f"mov.b32 %r{i}, 0;" for i in range(n // 2)]
    before += [f"mad.lo.u32 %r_f{i}, %r_z, {i}, %r_y;" for i in range(4)]
    for part, start in (("a", 0), ("b", 16384)):
        before += [f"add.u32 %r_at, %r_smem, {start};", "shr.u32 %r_at, %r_at, 4;"]
        before += ["cvt.u64.u32 %d_at, %r_at;", f"or.b64 %d_{part}0, %d_at, {PATTERN};"]
        before += [f"add.u64 %d_{part}{k}, %d_{part}0, {2 * k};" for k in range(1, 4)]
    sink = tuple(f"%r{i}" for i in range(n // 2))
    role = Role("\n".join(lines), before="\n".join(before), sink=sink)
    return Kernel((role,), block=128 * groups, smem=16384 + 32768)


def tensor() -> Iterator[Benchmark]:
    """Cycles of the SM per wgmma, from 8 and 16 per commit; and of one alone until its wait."""
    for registers in (False, True):
        for n in (64, 128, 256):
            a = "registers" if registers else "shared memory"
            for groups in (1, 2):
                points = tuple(
                    Point(wgmma_kernel(n, registers=registers, steps=steps, groups=groups), 32,
                          32 * steps * groups)
                    for steps in (8, 16)
                )  # fmt: skip
                variant = {"shape": f"m64n{n}k16", "a": a, "warpgroups": groups}
                unit = "cycles of the SM per instruction"
                yield Benchmark("tensor", "wgmma", variant, unit, points, arch=HOPPER)
            for steps in (1, 4):
                made = wgmma_kernel(n, registers=registers, steps=steps, groups=1)
                points = tuple(Point(made, count, count) for count in (64, 128))
                variant = {"shape": f"m64n{n}k16", "a": a, "per_commit": steps}
                yield Benchmark("tensor", "wgmma_until_wait", variant, CYCLES, points, arch=HOPPER)


# Instructions of two warps of each scheduler that take as long as the wgmmas of a round beside
# them, 1,024 cycles, if neither hinders the other: their text for a chain, and how many.
_FMA, _ADD = "fma.rn.f32 %r{x}, %r{x}, %r_y, %r_z;", "add.rn.f32 %r{s}, %r{s}, %r{t};"
_EX2, _CVT = "ex2.approx.ftz.f32 %r{t}, %r{x};", "cvt.rn.bf16x2.f32 %r{p}, %r{t}, %r{p};"
BESIDE = {
    "fma.f32": (_FMA, 512),
    "add.f32": (_ADD, 512),
    "ex2": (_EX2.replace("{x}", "{t}"), 64),
    "cvt.bf16x2.f32": (_CVT, 256),
    "softmax": (f"{_FMA}\n{_EX2}\n{_ADD}", 64),
    "softmax, rounded": (f"{_FMA}\n{_EX2}\n{_ADD}\n{_CVT}", 64),
}
_CHAINS, _TENSOR_STEPS = 16, 16


def _beside_role(text: str, steps: int, first: int) -> Role:
    """Warps from `first` on: so many steps of it over independent chains."""
    names = [{key: 100 * number + chain for number, key in enumerate("xtsp", start=1)}
             for chain in range(_CHAINS)]  # fmt: skip
    body = [text.format(**names[step % _CHAINS]) for step in range(steps)]
    before = [f"add.u32 %r{place}, %r_z, {place};" for name in names for place in name.values()]
    sink = tuple(f"%r{place}" for name in names for place in name.values())
    return Role("\n".join(body), first=first, before="\n".join(before), sink=sink)


def beside() -> Iterator[Benchmark]:
    """Cycles of a round of both: a warpgroup that multiplies without a pause, and two more that
    compute; and of those two alone."""
    tensor = wgmma_kernel(128, registers=False, steps=_TENSOR_STEPS, groups=1)
    multiplies = replace(tensor.roles[0], last=SCHEDULERS)
    for name, (text, steps) in BESIDE.items():
        for with_tensor in (False, True):
            computes = _beside_role(text, steps, SCHEDULERS)
            roles = (multiplies, computes) if with_tensor else (computes,)
            made = replace(tensor, roles=roles, block=3 * SCHEDULERS * WARP)
            points = tuple(Point(made, count, count) for count in (64, 128))
            variant = {"instruction": name, "wgmma": with_tensor, "warps": 2}
            unit = "cycles per round"
            yield Benchmark("tensor", "wgmma_beside", variant, unit, points, arch=HOPPER)


def benchmarks() -> Iterator[Benchmark]:
    yield from issue()
    yield from latency()
    yield from tensor()
    yield from beside()
    yield from branches()
