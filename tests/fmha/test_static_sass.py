"""What ptxas made of the softmax loop: instructions, spills, and where it publishes.

Counted between loop head and back edge, per warp and 128 x 128 tile, without the correction of O.
The late publish is a trap that no result shows: the MMA warp waits longer, and that is all. In the
ping-pong schedule the correction warps wait, too, for the row statistics.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from cycle_model.sass.tools import HOW_TO_GET_TOOLS, resources, tools_found
from fmha.config import AttentionConfig
from fmha.launch import compile_attention
from workbench.sass import softmax as _softmax_sass

pytestmark = [
    pytest.mark.skipif(not tools_found(), reason=HOW_TO_GET_TOOLS),
    pytest.mark.usefixtures("whole_ptxas"),
]

ONE_SIDED = {"right": True}
TWO_SIDED = {"right": True, "left": True}
SINK_TOKENS = {**TWO_SIDED, "sink_tokens": True}
SOFTCAP = {**SINK_TOKENS, "softcap": True}

# mask, most instructions of (unmasked loop, masked loop); in a CTA pair half of a row is a tile
BUDGETS = (
    (ONE_SIDED, (515, 690)),
    (TWO_SIDED, (515, 720)),
    (SINK_TOKENS, (515, 720)),
    (SOFTCAP, (900, 1075)),
)
# Cycles that the compiler's stall counts ask for: of the (unmasked loop, masked loop), by softcap;
# and from one exponential to the next, where 8 would be enough (notes/log.md, 2026-11-24).
MOST_STALLS = {False: (1720, 2080), True: (4170, 4410)}
MUFU_DISTANCE = 10
LATEST_STATISTICS, LATEST_READY = 0.50, 0.94  # shares of those cycles
ROW_SUM = 60  # of its 65 packed additions, at least so many behind the arrival that signals P
CORRECTION_CHUNK = 16  # columns of O that a correction warp loads and stores at a time

ALL_FIELDS = (
    {},
    {"kv_lens": True, "q_offset": True, "right": True, "sinks": True, "rope_dim": 64},
    {"varlen_q": True, "varlen_k": True, "left": True, "softcap": True, "out_dtype": "fp32"},
    {"page_size": 64, "kv_lens": True, **SINK_TOKENS, "pack_heads": True, "dtype": "fp16"},
    {"normalize": False, "pack_heads": True, "pdl": True, "varlen_q": True},
)
DIMS = ((64, 0), (96, 0), (128, 0), (192, 128), (256, 0), (512, 0))
KERNELS = [
    (dims, p_path, schedule)
    for dims, p_path, schedule in itertools.product(DIMS, ("tmem", "smem"), ("base", "pingpong"))
    if not (dims[0] == 512 and p_path == "tmem") and not (dims[0] > 128 and schedule == "pingpong")
]
# Every mask at the dims that have budgets, one at the others.
LOOPS = [
    (kernel, *mask)
    for kernel, mask in itertools.product(KERNELS, BUDGETS)
    if kernel[0][0] in (64, 128) or mask[0] is ONE_SIDED
]


@pytest.fixture(scope="module")
def cubin(tmp_path_factory):
    """config -> the file with its kernel."""
    folder, known = tmp_path_factory.mktemp("cubins"), {}

    def write(config: AttentionConfig):
        if config not in known:
            known[config] = folder / f"{len(known)}.cubin"
            known[config].write_bytes(compile_attention(config).cubin)
        return known[config]

    return write


def name(value: object) -> str:
    """A test id: fields that are set, numbers and words of a kernel."""
    if isinstance(value, dict):
        return "+".join(value) or "plain"
    (head_dim, v_head_dim), p_path, schedule = value
    return f"{head_dim}.{v_head_dim or head_dim}-{p_path}-{schedule}"


def config_of(kernel: tuple, fields: dict) -> AttentionConfig:
    (head_dim, v_head_dim), p_path, schedule = kernel
    config = AttentionConfig(head_dim=head_dim, v_head_dim=v_head_dim, p_path=p_path)
    return replace(config, schedule=schedule, **fields)


@pytest.mark.parametrize(
    ("kernel", "mask", "budget"),
    [pytest.param(*loops, id=f"{name(loops[0])}-{name(loops[1])}") for loops in LOOPS],
)
def test_softmax_loops(cubin, kernel, mask, budget):
    config = config_of(kernel, mask)
    figures = _softmax_sass.static(cubin(config))
    assert (figures.stack, figures.spills) == (0, 0)
    # Two copies, each whole: nothing rolled up inside them, split off, or left in straight code.
    assert sorted(loop.masked for loop in figures.loops) == [False, True]
    assert [loop.nested for loop in figures.loops] == [(), ()]
    assert figures.outside == 0
    check_correction(figures, config)
    for loop in figures.loops:
        assert loop.tiles == 1
        assert loop.total <= budget[loop.masked] // config.ctas + 20 * (config.ctas - 1)
        assert loop.opcodes()["R2P"] == (16 // config.ctas if loop.masked else 0)
        check_publishes(loop, config)
        check_stalls(loop, config)


def check_correction(figures: _softmax_sass.Static, config: AttentionConfig) -> None:
    """It stands in the softmax loops, or by itself in one loop over both query tiles."""
    if config.schedule == "base":
        assert all(loop.correction for loop in figures.loops)
        assert figures.others == {}
        return
    assert not any(loop.correction for loop in figures.loops)
    (work,) = figures.others.values()
    chunks = 2 * config.v_dim // CORRECTION_CHUNK
    assert work == {"LDTM": chunks, "STTM": chunks}


def check_stalls(loop: _softmax_sass.SoftmaxLoop, config: AttentionConfig) -> None:
    """A static bound of a tile: no warp can be faster than its control words say."""
    assert loop.mufu_distance <= MUFU_DISTANCE
    most = MOST_STALLS[config.softcap][loop.masked]
    assert loop.stalls <= most // config.ctas + 100 * (config.ctas - 1)


def check_publishes(loop: _softmax_sass.SoftmaxLoop, config: AttentionConfig) -> None:
    """Early statistics, and P before the row sum.

    Softcap makes the part before P longer and nothing else, so it is left out of the shares.
    """
    places = loop.publishes()
    softcap = MOST_STALLS[True][loop.masked] - MOST_STALLS[False][loop.masked]
    whole = loop.stalls - (softcap / config.ctas if config.softcap else 0)
    assert 1 - loop.stalls * (1 - places.ready) / whole <= LATEST_READY
    assert places.adds_after >= ROW_SUM // config.ctas - 4 * (config.ctas - 1)
    # Only in a pair and in the ping-pong schedule another thread waits for what one knows of a row.
    assert (places.statistics is None) == (config.ctas == 1 and config.schedule == "base")
    if places.statistics is not None:
        assert 1 - loop.stalls * (1 - places.statistics) / whole <= LATEST_STATISTICS


@pytest.mark.parametrize(("kernel", "fields"), [*itertools.product(KERNELS, ALL_FIELDS)], ids=name)
def test_no_config_spills(cubin, kernel, fields):
    """The stack is where registers spill to."""
    (usage,) = resources(cubin(config_of(kernel, fields)))
    assert usage.stack == 0
