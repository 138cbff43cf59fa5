"""Compiled loop that explores ways to the next landmark, in the order of the work on them.

`search` prepares the tables and documents their purpose.

frame: the words below, then for each kind of work the amount wanted, the most, and scratch.
places: the work of a run of straight code, and its edges.
nodes: ways that reached a place, each with its predecessor; the table finds a node by place and
work.

If several ways have done the same amount of work, those are continued whose shares of the kinds of
work are nearest to the shares in the whole.
"""

from __future__ import annotations

from cycle_model.binding.symbols import ACCESSES, KINDS
from ptxemu.native.routines import p_f64, p_i32, p_i64, routine, wrap

KIND_COUNT = len(KINDS)
ACCESS_MASK = sum(1 << kind for kind in ACCESSES)
KEPT = 4  # ways to a place that have done as much work
FORGIVEN = 0.75  # of accesses that a guard may have kept from being executed
PER_INSTRUCTION = 1e-4

# -- frame ---------------------------------------------------------------------------------------
STEP, MOST, CAPACITY, SLOT_MASK, NODE_COUNT, HEAP_COUNT, ARRIVED, START = range(8)
PLACES_AT, EDGES_AT, EDGE_COSTS_AT, NODES_AT, NUMBERS_AT, HEAP_AT, TABLE_AT = range(8, 15)
GOALS_AT, GOAL_COSTS_AT, ORDER_AT = range(15, 18)
WANTED = 20
LIMIT, WORK = WANTED + KIND_COUNT, WANTED + 2 * KIND_COUNT
FRAME_WORDS = WANTED + 3 * KIND_COUNT

# -- places: how many came with so many steps of work, work of the run ----------------------------
LENGTH, MAYBE, FIRST_EDGE, END_EDGE, CAME, CAME_WITH = range(6)
RUN_WORK = 6
PLACE_WORDS = RUN_WORK + KIND_COUNT
# edges: a place, or behind all places a goal

# -- nodes ---------------------------------------------------------------------------------------
PLACE, BEFORE, INSTRUCTIONS, GUARDED, STEPS, SLOT = range(6)
NODE_WORK = 6
NODE_WORDS = NODE_WORK + KIND_COUNT
FAR, COST = range(2)  # numbers
NUMBER_WORDS = 2

_PRIME = 0x100000001B3


@routine
def earlier(frame: p_i64, one: int, other: int) -> int:
    """Less work, then nearer shares, then fewer instructions."""
    nodes = p_i64(frame[NODES_AT])
    numbers = p_f64(frame[NUMBERS_AT])
    a, b = (one * NODE_WORDS, other * NODE_WORDS)
    if nodes[a + STEPS] != nodes[b + STEPS]:
        return 1 if nodes[a + STEPS] < nodes[b + STEPS] else 0
    far, further = (numbers[one * NUMBER_WORDS + FAR], numbers[other * NUMBER_WORDS + FAR])
    if far != further:
        return 1 if far < further else 0
    if nodes[a + INSTRUCTIONS] != nodes[b + INSTRUCTIONS]:
        return 1 if nodes[a + INSTRUCTIONS] < nodes[b + INSTRUCTIONS] else 0
    return 1 if one < other else 0


@routine
def put(frame: p_i64, node: int) -> None:
    """Into the heap."""
    heap = p_i64(frame[HEAP_AT])
    at = frame[HEAP_COUNT]
    frame[HEAP_COUNT] = at + 1
    while at > 0 and earlier(frame, node, heap[(at - 1) // 2]) != 0:
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = node


@routine
def taken(frame: p_i64) -> int:
    """The first of the heap."""
    heap = p_i64(frame[HEAP_AT])
    count = frame[HEAP_COUNT] - 1
    frame[HEAP_COUNT] = count
    first, last = (heap[0], heap[count])
    at = 0
    while 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count and earlier(frame, heap[child + 1], heap[child]) != 0:
            child += 1
        if earlier(frame, heap[child], last) == 0:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = last
    return first


@routine
def is_new(frame: p_i64, node: int) -> int:
    """Whether no node has been in this place with this work; then this one has."""
    nodes = p_i64(frame[NODES_AT])
    table = p_i32(frame[TABLE_AT])
    at = node * NODE_WORDS
    digest = nodes[at + PLACE]
    for kind in range(KIND_COUNT):
        digest = wrap((digest ^ nodes[at + NODE_WORK + kind]) * _PRIME)
    slot = (digest >> 24) & frame[SLOT_MASK]
    while table[slot] != 0:
        other = (table[slot] - 1) * NODE_WORDS
        same = 1 if nodes[other + PLACE] == nodes[at + PLACE] else 0
        for kind in range(KIND_COUNT):
            if nodes[other + NODE_WORK + kind] != nodes[at + NODE_WORK + kind]:
                same = 0
        if same != 0:
            return 0
        slot = (slot + 1) & frame[SLOT_MASK]
    table[slot] = node + 1
    nodes[at + SLOT] = slot
    return 1


@routine
def shares_off(frame: p_i64) -> float:
    """Return the distance of the shares of the kinds of work from those wanted; 2 without work."""
    done, whole = (0, 0)
    for kind in range(KIND_COUNT):
        done += frame[WORK + kind]
        whole += frame[WANTED + kind]
    if done == 0:
        return 2.0
    far = 0.0
    for kind in range(KIND_COUNT):
        share = float(frame[WANTED + kind]) / float(max(whole, 1))
        far += abs(float(frame[WORK + kind]) / float(done) - share)
    return far


@routine
def work_off(frame: p_i64, guarded: int) -> float:
    """Return the distance of the work from the work wanted.

    Excess accesses that a guard may have suppressed count only in part.
    """
    off, excess = (0, 0)
    for kind in range(KIND_COUNT):
        more = frame[WORK + kind] - frame[WANTED + kind]
        off += abs(more)
        if ACCESS_MASK >> kind & 1 != 0:
            excess += max(more, 0)
    return float(off) - FORGIVEN * float(min(guarded, excess))


@routine
def does_run(frame: p_i64, node: int, place: int) -> int:
    """Add what a run does to the work of a node: whether it is not too much."""
    nodes = p_i64(frame[NODES_AT])
    places = p_i64(frame[PLACES_AT])
    fits = 1
    for kind in range(KIND_COUNT):
        done = nodes[node + NODE_WORK + kind] + places[place + RUN_WORK + kind]
        frame[WORK + kind] = done
        if done > frame[LIMIT + kind]:
            fits = 0
    return fits


@routine
def go_on(frame: p_i64, node: int, goal: int, far: float, cost: float) -> int:
    """Add a node for `goal` with the work done so far, unless it exists; return 0 without room."""
    nodes = p_i64(frame[NODES_AT])
    numbers = p_f64(frame[NUMBERS_AT])
    places = p_i64(frame[PLACES_AT])
    fresh = frame[NODE_COUNT]
    if fresh == frame[CAPACITY]:
        return 0
    at, before = (fresh * NODE_WORDS, node * NODE_WORDS)
    nodes[at + PLACE] = goal
    done = 0
    for kind in range(KIND_COUNT):
        nodes[at + NODE_WORK + kind] = frame[WORK + kind]
        done += frame[WORK + kind]
    if is_new(frame, fresh) == 0:
        return 1
    place = nodes[before + PLACE] * PLACE_WORDS
    nodes[at + BEFORE] = node
    nodes[at + INSTRUCTIONS] = nodes[before + INSTRUCTIONS] + places[place + LENGTH]
    nodes[at + GUARDED] = nodes[before + GUARDED] + places[place + MAYBE]
    nodes[at + STEPS] = done // frame[STEP]
    numbers[fresh * NUMBER_WORDS + FAR] = far
    numbers[fresh * NUMBER_WORDS + COST] = cost
    frame[NODE_COUNT] = fresh + 1
    put(frame, fresh)
    return 1


@routine
def arrive(frame: p_i64, node: int, goal: int, cost: float) -> None:
    """Record an arrival at the landmark; only the cheapest one per following place counts."""
    goals = p_i64(frame[GOALS_AT])
    costs = p_f64(frame[GOAL_COSTS_AT])
    order = p_i64(frame[ORDER_AT])
    if goals[goal] < 0:
        order[frame[ARRIVED]] = goal
        frame[ARRIVED] += 1
    elif cost >= costs[goal]:
        return
    goals[goal] = node
    costs[goal] = cost


@routine
def leave(frame: p_i64, node: int, place_count: int) -> int:
    """A place, by all of its edges; whether there was room."""
    nodes = p_i64(frame[NODES_AT])
    numbers = p_f64(frame[NUMBERS_AT])
    places = p_i64(frame[PLACES_AT])
    edges = p_i64(frame[EDGES_AT])
    edge_costs = p_f64(frame[EDGE_COSTS_AT])
    at = node * NODE_WORDS
    place = nodes[at + PLACE] * PLACE_WORDS
    if does_run(frame, at, place) == 0:
        return 1
    far = shares_off(frame)
    guarded = nodes[at + GUARDED] + places[place + MAYBE]
    length = nodes[at + INSTRUCTIONS] + places[place + LENGTH]
    for edge in range(places[place + FIRST_EDGE], places[place + END_EDGE]):
        cost = numbers[node * NUMBER_WORDS + COST] + edge_costs[edge]
        if edges[edge] >= place_count:
            total = cost + work_off(frame, guarded) + PER_INSTRUCTION * float(length)
            arrive(frame, node, edges[edge] - place_count, total)
        elif go_on(frame, node, edges[edge], far, cost) == 0:
            return 0
    return 1


@routine
def explore(frame: p_i64, place_count: int) -> int:
    """Whether there was room for all nodes."""
    nodes = p_i64(frame[NODES_AT])
    numbers = p_f64(frame[NUMBERS_AT])
    places = p_i64(frame[PLACES_AT])
    table = p_i32(frame[TABLE_AT])
    for place in range(place_count):
        places[place * PLACE_WORDS + CAME_WITH] = -1
    for word in range(NODE_WORDS):
        nodes[word] = 0
    nodes[PLACE] = frame[START]
    nodes[BEFORE] = -1
    numbers[FAR] = 0.0
    numbers[COST] = 0.0
    frame[NODE_COUNT] = 1
    frame[HEAP_COUNT] = 0
    frame[ARRIVED] = 0
    is_new(frame, 0)
    put(frame, 0)
    room = 1
    while frame[HEAP_COUNT] > 0 and room != 0:
        node = taken(frame)
        steps = nodes[node * NODE_WORDS + STEPS]
        if steps > frame[MOST]:
            break
        place = nodes[node * NODE_WORDS + PLACE] * PLACE_WORDS
        if places[place + CAME_WITH] != steps:
            places[place + CAME_WITH] = steps
            places[place + CAME] = 0
        places[place + CAME] += 1
        if places[place + CAME] <= KEPT:
            room = leave(frame, node, place_count)
    for node in range(frame[NODE_COUNT]):
        table[nodes[node * NODE_WORDS + SLOT]] = 0
    return room
