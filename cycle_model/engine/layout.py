"""Words of the engine's tables: int64, except path and numbers, which are int32.

state: everything that changes, and the addresses of the other tables.
code: properties of each SASS instruction.
path: numbers of instructions, warp after warp.
numbers: number of each instruction's event, -1 for none.
events: effects of landmarks and accesses.
signals: effects of events on mbarriers.

Times are cycles; fractional values are kept in parts of `PART`.
"""

from __future__ import annotations

PART = 64  # of a cycle
NEVER = 1 << 60

# -- state: a head, then tables at fixed places --------------------------------------------------
NOW, LIVE, WARPS_IN_ALL, SMS, HEAP_SIZE, HEAP_COUNT, STEPS, STUCK = range(8)
EVENT_SEQUENCE, ISSUED = range(8, 10)
# where the other tables are
HEAP_AT, SETTINGS_AT, CODE_AT, PATH_AT, NUMBERS_AT, EVENTS_AT, SIGNAL_TABLE_AT = range(10, 17)
LOG_AT = 17
UNIT_BEGIN, UNIT_END = 18, 19  # when a unit is busy with what has been issued

MOST_SMS, MOST_CTAS, MOST_WARPS, MOST_BARRIERS = 32, 64, 1024, 16384
SCHEDULERS = 4  # of an SM
PIPES = 8  # of a scheduler
FMA, ALU, SPECIAL, UNIFORM, TENSOR, BRANCH, MEMORY, NO_PIPE = range(PIPES)

# of an SM: when its shared pipes are free
LSU_FREE, TMA_ISSUE_FREE, TMA_FREE, TENSOR_FREE, TENSOR_LAST, L2_FREE, HBM_FREE, SMEM_FREE = range(
    8
)
TENSOR_BUSY, TMA_BUSY, LSU_BUSY, STORE_FREE, DSMEM_FREE, TENSOR_CAUSE = range(8, 14)
PARAMETERS_FREE, HBM_BUSY, L2_WRITE_FREE, L2_WRITE_BUSY, L2_BUSY = range(14, 19)
SMEM_IDLE, TENSOR_TAIL, LINES_FREE = 19, 20, 21
SM_WORDS = 24
SM = 64
# of a scheduler: when it next has something to do, which warp is first, its pipes
NEXT_AT, TURN, FIRST_WARP, WARP_COUNT, YIELDED = range(5)
PIPE_FREE, PIPE_BUSY, TMEM_LOAD_FREE, TMEM_STORE_FREE = 8, 16, 24, 25
PIPE_CAUSE = 26
WGMMA_FREE = 37  # when the last wgmma ends
SCHEDULER_WORDS = 40
SCHEDULER = SM + MOST_SMS * SM_WORDS
# of a CTA: named barriers
BARRIERS = 16
NB_ARRIVED, NB_WAITING = range(2)
CTA_WORDS = BARRIERS * 2 + 8
CTA_CLUSTER, CTA_LIVE = BARRIERS * 2, BARRIERS * 2 + 1
CTA = SCHEDULER + MOST_SMS * SCHEDULERS * SCHEDULER_WORDS
# of a cluster
CL_ARRIVED, CL_PHASE, CL_LIVE = range(3)
CLUSTER_WORDS = 4
CLUSTER = CTA + MOST_CTAS * CTA_WORDS
# of an mbarrier
MB_EXPECTED, MB_PENDING, MB_BYTES, MB_PHASE, MB_WAITERS, MB_CAUSE = range(6)
MB_WORDS = 8
MBARRIER = CLUSTER + MOST_CTAS * CLUSTER_WORDS
# of a warp
PATH_BEGIN, PATH_END, POSITION, WARP_NEXT, WARP_CTA, WARP_SM, WARP_SCHEDULER, BLOCKED = range(8)
WAITS_FOR, WAIT_PARITY, BEGAN, DONE, CLUSTER_PHASE, BULK_OPEN, BULK_READ_OPEN = range(8, 15)
BULK_COUNT, COPY_OPEN, COPY_COUNT, CAUSE, REASON, READY, LAST = range(15, 22)
WG_LAST, WG_COUNT = range(22, 24)
SB_TIME, SB_CAUSE = 32, 40  # of six scoreboards
GROUPS = 64  # of bulk copies and of cp.async that are remembered
BULK_DONE, BULK_READ, COPY_DONE, WG_DONE = (64 + GROUPS * k for k in range(4))
WARP_WORDS = 64 + 4 * GROUPS
WARP = MBARRIER + MOST_BARRIERS * MB_WORDS
STATE_WARP_LIST = WARP + MOST_WARPS * WARP_WORDS  # numbers of warps, by scheduler
# of an SM: since when it has lines of code and sectors of parameters, 0 for never
CODE_LINES, PARAMETER_SECTORS = 4096, 128
SEEN_WORDS = CODE_LINES + PARAMETER_SECTORS
SEEN = STATE_WARP_LIST + MOST_WARPS
STATE_WORDS = SEEN + MOST_SMS * SEEN_WORDS
LINES_QUEUE = 64  # cycles of lines that are looked up later than they are asked for
TMEM_QUEUE = 64  # cycles of work that a port takes in advance
# why a warp is BLOCKED
RUNS, ON_MBARRIER, ON_BARRIER, ON_CLUSTER = range(4)

# -- code: of an instruction ---------------------------------------------------------------------
KIND, PIPE, OCCUPANCY, LATENCY, STALL, WRITES, READS, WAITS, REGISTERS, YIELDS = range(10)
SECTOR = 10  # of parameters that it reads, from 1 on; 0: none
CODE_WORDS = 12
PLAIN, TMEM_LOAD, TMEM_STORE, EVENT, TMEM_STORE_WAIT, GRID_WAIT = range(6)  # kinds

# -- events --------------------------------------------------------------------------------------
WHAT, SIGNALS, SIGNAL_COUNT, A, B, C, D = range(7)
EVENT_WORDS = 8
E_NONE, E_INIT, E_ARRIVE, E_WAIT, E_LOAD, E_STORE, E_SEND, E_MMA, E_COMMIT, E_FILL = range(10)
E_BULK_COMMIT, E_GROUP_WAIT, E_COPY_COMMIT, E_COPY_ARRIVE = range(10, 14)
E_BARRIER, E_BARRIER_ARRIVE, E_CLUSTER_ARRIVE, E_CLUSTER_WAIT = range(14, 18)
E_CANCEL, E_WGMMA, E_WGMMA_WAIT = range(18, 21)
E_GLOBAL_LOAD, E_GLOBAL_STORE, E_SHARED, E_COPY, E_REMOTE = range(21, 26)  # of memory: the last
GATHERS = 2  # more in C of a load whose rows are named one by one
# signals: an mbarrier, arrivals, bytes, whether it is in another CTA
S_BARRIER, S_COUNT, S_BYTES, S_REMOTE = range(4)
SIGNAL_WORDS = 4

# -- the heap: what happens later ----------------------------------------------------------------
H_TIME, H_ORDER, H_WHAT, H_A, H_B, H_CAUSE = range(6)
HEAP_WORDS = 6
ARRIVALS, BYTES, WAKE = range(3)  # H_A: mbarrier or warp; H_B: how many

# -- the log: of each instruction that is issued -------------------------------------------------
L_TIME, L_WARP, L_POSITION, L_CAUSE, L_REASON, L_READY, L_BEGIN, L_END = range(8)
LOG_WORDS = 8
IN_ORDER, SCOREBOARD, PIPE_BUSY_REASON, WOKEN = range(4)  # reasons
