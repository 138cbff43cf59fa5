"""Rules: issue, latencies, branches, barriers, and shared memory of an SM and of a cluster."""

from __future__ import annotations

from lab.silicon.units.rules.arithmetic import Expression, constant, mean, not_negative, row
from lab.silicon.units.rules.rule import Rule

WARPS = 4  # of a scheduler, so that it always has one that can issue
FMAS = 8  # between the jumps of launch_body


def issue(instruction: str, schedulers: int = 1) -> Expression:
    return row("issue", instruction=instruction, warps=WARPS, schedulers=schedulers)


def latency(instruction: str) -> Expression:
    return row("latency", instruction=instruction)


def fence(name: str, behind: str = "nothing") -> Expression:
    return row("latency_membar", fence=name, behind=behind)


CLOCK = row("clock", load="fma of all SMs")  # GHz
PER_US = CLOCK * 1000.0  # cycles
WOKEN = row("mbarrier_wake", wait="try_wait", asleep_for=500)  # with the arrival
ARRIVES = 0.28  # of that: the arrival's share
SPLIT = "only the sum with the other one is measured, and split in the same way each time"
PING_PONG = row("mbarrier_ping_pong", wait="try_wait", schedulers=2)
REMOTE = row("mbarrier_ping_pong_remote", wait="try_wait", arrive="as by default", lanes=None)
ARRIVAL = row("mbarrier_arrive_issue", form="arrive", completes=False, lanes=1)
READY = row("mbarrier_ready", form="try_wait", chain="branch")
BEFORE = row("branch", branch="bra.uni", taken=True)
BESIDE = row("branch", branch="bra.uni", taken=False)


def relaxed(ctas: int) -> Expression:
    return row("cluster_barrier", ctas=ctas, arrive="relaxed", warps=4)


def barrier(warps: int) -> Expression:
    return row("named_barrier", warps=warps)


ISSUE = {
    "issue_fma": (Rule(issue("fma.f32")),),
    "issue_fma2": (Rule(issue("fma.f32x2")),),
    "issue_imad": (Rule(issue("mad.lo.s32")),),
    "issue_alu": (Rule(issue("lop3"), also=tuple(map(issue, ("min.f32", "prmt", "shf")))),),
    "issue_pack": (Rule(issue("cvt.bf16x2.f32")),),
    "issue_special": (Rule(issue("ex2")),),
    "issue_convert": (Rule(issue("cvt.s32.f32"), also=(issue("popc"), issue("clz"))),),
    "issue_tensor": (
        Rule(issue("mma.m16n8k16"), above=2, why="kernels with operands from shared memory"),
    ),
    "issue_access": (Rule(issue("ld.shared.b32", 4), also=(issue("st.shared.b32", 4),)),),
    "issue_shuffle": (Rule(issue("shfl", 4)),),
    "issue_reduce": (Rule(issue("redux", 4)),),
    "smem_bytes_per_cycle": (
        Rule(constant(512) / issue("ld.shared.v4.b32", 4), below=16, why="beside other accesses"),
    ),
}
LATENCY = {
    "latency_fma": (Rule(latency("fma.f32"), also=(latency("add.s32"),)),),
    "latency_alu": (Rule(latency("lop3"), also=(latency("add.s32"),)),),
    "latency_special": (Rule(latency("ex2"), also=(latency("rcp") - latency("add.f32"),)),),
    "latency_tensor": (Rule(latency("mma.m16n8k16"), not_for="sm_90a"),),
    "latency_shuffle": (Rule(latency("shfl"), also=(latency("redux") - latency("lop3"),)),),
    "latency_constant": (Rule(latency("ld.const"), above=32, why="LDC that is first of its line"),),
    "latency_vote": (
        Rule(latency("vote.ballot") - latency("lop3"), also=(latency("vote.ballot"),), below=2,
             why="the comparison in front is 4 to 6"),
    ),
    "latency_special_register": (
        Rule(latency("mov from clock"),
             also=(latency("mov from clock") - latency("setp selp"),
                   latency("mov from special") - latency("setp selp"))),
    ),
    "latency_membar": (
        Rule(fence("fence.acq_rel.cta"),
             also=(fence("membar.cta"), fence("fence.acq_rel.cta", "a store to global memory"))),
    ),
    "latency_membar_gpu": (
        Rule(fence("fence.acq_rel.gpu"),
             also=(fence("fence.acq_rel.gpu", "a store to global memory"),)),
    ),
    "latency_atomic_shared": (
        Rule(row("latency_atomic_shared", form="atom.shared.add.u32"),
             also=(latency("atom.shared chain"),)),
    ),
    "latency_atomic_global": (
        Rule(row("latency_atomic_global", form="atom.global.add.u32", lanes=1),
             also=(row("latency_atomic_global", form="atom.global.cas.b32", lanes=32),), below=16,
             why="L2 is nearer to some SMs"),
    ),
    "latency_tensor_allocation": (
        Rule(row("tensor_allocation", form="alloc and dealloc") / 2.0, below=20, above=60, step=5,
             why="the two may differ"),
    ),
    "shared_latency": (
        Rule(latency("ld.shared.b32 chain") - 1.0, also=(latency("ld.shared.v2 chain"),),
             why="the engine adds the cycle of issue"),
    ),
}  # fmt: skip
CONTROL = {
    "branch": (Rule(BEFORE - BESIDE, below=2, above=2, why="beside stores"),),
    "branch_cold": (
        Rule(not_negative((row("launch_body", body="16 jumps over 56", block=32)
              - row("launch_body", body="4 jumps over 56", block=32)) * PER_US / 12.0
             - (BEFORE - BESIDE) - float(FMAS)), step=4, above=33,
             why="jumps over 248 cost more: a page of code"),
    ),
    "parameter_sector": (
        Rule((row("launch_parameters", words=48, apart=64)
              - row("launch_parameters", words=32, apart=64)) * PER_US / 16.0 - latency("lop3"),
             below=5, above=8, why="4 to 8 words cost more each"),
    ),
    "mbarrier_arrive": (Rule(WOKEN * ARRIVES, below=6, above=6, why=SPLIT),),
    "mbarrier_wake": (Rule(WOKEN * (1 - ARRIVES), below=6, above=6, why=SPLIT),),
    "mbarrier_ready": (Rule(READY - 9.0, also=(READY,), below=7, why="9 are those of its use"),),
    "mbarrier_arrive_remote": (
        Rule(REMOTE - PING_PONG, below=6, above=54, why="with release at cluster scope it is more"),
    ),
    "named_barrier": (Rule(barrier(1) * 2.0 - barrier(2), below=2, above=2, why="turns differ"),),
    "named_barrier_warp": (Rule((barrier(32) - barrier(1)) / 31.0),),
    "cluster_barrier": (Rule(relaxed(2), also=(relaxed(8),), below=4, why="turns differ"),),
}  # fmt: skip
CLUSTER = {
    "dsmem_latency": (
        Rule(row("dsmem_async", form="st.async.b32") - WOKEN - ARRIVAL, below=10, above=20, step=10,
             why="less wake-up and issue, which are split by guess"),
    ),
    "dsmem_rate": (
        Rule(row("dsmem_rate", form="st.v4.b32", warps=4, both_ways=False),
             also=(row("dsmem_rate", form="st.async.v4.b32", warps=1),
                   row("dsmem_rate", form="st.async.v4.b32", warps=4))),
    ),
    "dsmem_load": (
        Rule(mean(row("dsmem_latency", form="generic, 64-bit pointers"),
                  row("dsmem_latency", form="ld.shared::cluster.u32")),
             also=(row("dsmem_latency", form="generic, 64-bit pointers"),
                   row("dsmem_latency", form="ld.shared::cluster.u32"))),
    ),
}  # fmt: skip
RULES = {**ISSUE, **LATENCY, **CONTROL, **CLUSTER}
