"""ptxas' code of the softmax loop: instructions, spills, and when it publishes.

Counted between loop head and back edge, per warp and 128 x 128 tile. No result shows a late
publish: the MMA warp or the correction warps only wait longer.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from cycle_model.sass.tools import HOW_TO_GET_TOOLS, resources, tools_found
from fmha.config import EXP2_PAIRS, AttentionConfig
from fmha.launch import compile_attention
from fmha.sm100.layout import Layout
from lab.sass import softmax as _softmax_sass

pytestmark = [
    pytest.mark.skipif(not tools_found(), reason=HOW_TO_GET_TOOLS),
    pytest.mark.usefixtures("whole_ptxas"),
]

ONE_SIDED = {"right": True}
TWO_SIDED = {"right": True, "left": True}
SINK_TOKENS = {**TWO_SIDED, "sink_tokens": True}
SOFTCAP = {**SINK_TOKENS, "softcap": True}

MASKS = (ONE_SIDED, TWO_SIDED, SINK_TOKENS, SOFTCAP)

MUFU_DISTANCE = 8  # cycles from one exponential to the next: the unit's rate
LATEST_STATISTICS, LATEST_READY = 0.50, 0.94  # shares of the cycles of a tile
ROW_SUM = 60  # of its 65 packed additions, the minimum after the arrival that signals P
ONE_HOT_BLOCK = (20, 60)  # instructions and stalls of `refer` for huge scores
CORRECTION_CHUNK = 16  # columns of O that a correction warp loads and stores at a time

ALL_FIELDS = (
    {},
    {"kv_lens": True, "q_offset": True, "right": True, "sinks": True, "rope_dim": 64},
    {"varlen_q": True, "varlen_k": True, "left": True, "softcap": True, "out_dtype": "fp32"},
    {"page_size": 64, "kv_lens": True, **SINK_TOKENS, "group": 2, "dtype": "fp16", "tile_n": 128},
    {"normalize": False, "group": 2, "pdl": True, "varlen_q": True},
)
DIMS = ((64, 0), (96, 0), (128, 0), (192, 128), (256, 0), (512, 0))
KERNELS = [
    (dims, schedule)
    for dims, schedule in itertools.product(DIMS, ("base", "pingpong"))
    if not (dims[0] > 128 and schedule == "pingpong")
]
# Every mask at the tuned dims, one at the others.
LOOPS = [
    (kernel, mask)
    for kernel, mask in itertools.product(KERNELS, MASKS)
    if kernel[0][0] in (64, 128) or mask is ONE_SIDED
]


@pytest.fixture(scope="module")
def cubin(tmp_path_factory):
    """Write the kernel of a config to a file once, and return its path."""
    folder, known = tmp_path_factory.mktemp("cubins"), {}

    def write(config: AttentionConfig):
        if config not in known:
            known[config] = folder / f"{len(known)}.cubin"
            known[config].write_bytes(compile_attention(config).cubin)
        return known[config]

    return write


def name(value: object) -> str:
    """A test id: fields that are set, numbers, and words of a kernel."""
    if isinstance(value, int):
        return str(value)
    if isinstance(value, dict):
        return "+".join(value) or "plain"
    (head_dim, v_head_dim), schedule = value
    return f"{head_dim}.{v_head_dim or head_dim}-{schedule}"


def config_of(kernel: tuple, fields: dict) -> AttentionConfig:
    (head_dim, v_head_dim), schedule = kernel
    config = AttentionConfig(head_dim=head_dim, v_head_dim=v_head_dim, schedule=schedule)
    return replace(config, **fields)


@pytest.mark.parametrize(
    ("kernel", "mask"),
    [pytest.param(*loop, id=f"{name(loop[0])}-{name(loop[1])}") for loop in LOOPS],
)
def test_softmax_loops(cubin, kernel, mask):
    config = config_of(kernel, mask)
    figures, layout = _softmax_sass.static(cubin(config)), Layout(config)
    assert (figures.stack, figures.spills) == (0, 0)
    # Two copies, each complete: no nested loop inside, no part split off, none in straight code.
    assert sorted(loop.masked for loop in figures.loops) == [False, True]
    assert [loop.nested for loop in figures.loops] == [(), ()]
    assert figures.outside == 0
    check_correction(figures, layout)
    for loop in figures.loops:
        assert loop.tiles == 1
        assert not loop.correction
        assert loop.opcodes()["R2P"] == (16 // layout.halves if loop.masked else 0)
        check_work(loop, layout)
        check_publishes(loop, layout)


def check_correction(figures: _softmax_sass.Static, layout: Layout) -> None:
    """The correction has one loop over tiles, for O of all query tiles; the code around it ends a
    block."""
    work = min(figures.others.values(), key=lambda opcodes: opcodes["LDTM"])
    chunks = layout.q_tiles * layout.config.v_dim // layout.halves // CORRECTION_CHUNK
    assert work == {"LDTM": chunks, "STTM": chunks}


def check_work(loop: _softmax_sass.SoftmaxLoop, layout: Layout) -> None:
    """Static bounds of a tile: no warp can be faster than its control words say."""
    most_instructions, most_stalls = budget(layout, loop.masked)
    assert loop.mufu_distance <= MUFU_DISTANCE
    assert loop.total <= most_instructions
    assert loop.stalls <= most_stalls


def budget(layout: Layout, masked: bool) -> tuple[float, float]:
    """Return the most (instructions, stall cycles of the control words) of a tile.

    128 columns: each pair computed by polynomial adds eight instructions and saves two
    exponentials; the mask and the softcap add more. A pair of halves has 64 columns. The block for
    rows of huge scores counts, although it is skipped.
    """
    shared = layout.exp2_share / EXP2_PAIRS
    instructions = 455 + 560 * shared + (195 if masked else 0)
    stalls = 1420 - 800 * shared + (400 if masked else 0)
    if layout.config.softcap:
        instructions, stalls = instructions + 390, stalls + 2500
    if layout.halves == 2:
        instructions, stalls = instructions / 2 + 50, stalls / 2 + 142  # ptxas 12.9: 130
    return instructions + ONE_HOT_BLOCK[0], stalls + ONE_HOT_BLOCK[1]


def check_publishes(loop: _softmax_sass.SoftmaxLoop, layout: Layout) -> None:
    """Statistics are published early, and P before the row sum.

    A softcap uses the MUFU before them, and leaves it to the first exponentials while they wait.
    """
    places = loop.publishes()
    assert places.adds_after >= ROW_SUM // layout.halves
    if not layout.config.softcap:
        assert places.ready <= LATEST_READY
        assert places.statistics <= LATEST_STATISTICS


NARROW = [((64, 0), "base"), ((64, 0), "pingpong"), ((128, 0), "pingpong")]


@pytest.mark.parametrize(
    ("kernel", "keys"), [*itertools.product(NARROW, (64, 80, 96, 112))], ids=name
)
def test_tiles_of_a_window(cubin, kernel, keys):
    """Tiles that the rules choose for windows; for gpt-oss, with eight heads in a tile, 80 keys.
    ptxas keeps exponentials of 80, 96 and 112 columns 10 cycles apart, whatever the code around
    them."""
    shared = {**TWO_SIDED, "sinks": True, "group": 8, "tile_n": keys}
    figures = _softmax_sass.static(cubin(config_of(kernel, shared)))
    assert (figures.stack, figures.spills) == (0, 0)
    assert len(figures.loops) == 2
    most = MUFU_DISTANCE if keys == 64 else MUFU_DISTANCE + 2
    assert all(loop.mufu_distance <= most for loop in figures.loops)


@pytest.mark.parametrize(("kernel", "fields"), [*itertools.product(KERNELS, ALL_FIELDS)], ids=name)
def test_no_config_spills(cubin, kernel, fields):
    """Registers spill to the stack."""
    (usage,) = resources(cubin(config_of(kernel, fields)))
    assert usage.stack == 0


FP8 = ({"dtype": "e4m3", "q_scale": True}, {"kv_dtype": "e4m3"})
FP8_KERNELS = [kernel for kernel in (*KERNELS, ((192, 128), "pingpong")) if kernel[0][0] < 512]


@pytest.mark.parametrize("form", FP8, ids=("e4m3", "two terms"))
@pytest.mark.parametrize("kernel", FP8_KERNELS, ids=name)
def test_products_of_e4m3(cubin, kernel, form):
    """Neither the split of Q nor scales cost softmax registers or instructions in its loop."""
    config = config_of(kernel, {**ONE_SIDED, **form, "k_scale": True, "v_scale": True})
    figures, layout = _softmax_sass.static(cubin(config)), Layout(config)
    assert (figures.stack, figures.spills, figures.outside) == (0, 0, 0)
    assert sorted(loop.masked for loop in figures.loops) == [False, True]
    for loop in figures.loops:
        assert loop.mufu_distance <= MUFU_DISTANCE
        assert loop.total <= budget(layout, loop.masked)[0]
