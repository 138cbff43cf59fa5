"""The cache: blocks, states and checkpoints of two requests that share a prefix, as they came out
of a `kvcache.Cache` on the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.tools import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODEL = "deepseek-v4-flash"
SHARED, FIRST, SECOND = 256, 330, 420  # tokens of the prefix, and of the two requests
SLOTS = {"blocks": 7, "states": 3, "checkpoints": 3}
# Of a slot: colour, hatch, so that neither needs the other.
FACES = {
    "first": (style.SKY, ""),
    "second": (style.ORANGE, "//"),
    "both": (style.GREEN, "xx"),
    "kept": (style.YELLOW, ".."),
    "free": ("white", ""),
    "reserved": ("#cccccc", ""),
}
RESERVED = {"blocks": "null", "states": "zeros"}  # what slot 0 of a pool is instead
# What a copy between two pools is for.
COPIES = {
    ("states", "checkpoints"): "state {} at a block's end is kept as checkpoint {}",
    ("checkpoints", "states"): "checkpoint {} is the beginning of state {}",
}
POOL, LANE = 0.9, 0.95  # heights of rows, in tokens of the vertical axis
BLOCK = 2.2  # width of a block in a lane


@dataclass(frozen=True)
class Lane:
    """A request: its name, tokens, hit, blocks in order, state."""

    name: str
    tokens: int
    hit: int
    blocks: tuple[int, ...]
    state: int


@dataclass(frozen=True)
class Story:
    """Contents of the cache at the end, and the copies made on the way.

    sizes: bytes of a slot by pool.
    copies: (pool, slot, pool, slot), from and to.
    kept: slots of checkpoints.
    """

    model: str
    block_tokens: int
    lanes: tuple[Lane, ...]
    slots: dict[str, int]
    sizes: dict[str, int]
    copies: tuple[tuple[str, int, str, int], ...]
    kept: tuple[int, ...] = field(default=())

    def holder(self, pool: str, slot: int) -> str:
        """Holder of the bytes: a name of FACES."""
        if pool == "checkpoints":
            return "kept" if slot in self.kept else "free"
        if slot == 0:
            return "reserved"
        held = [lane.name for lane in self.lanes if slot in self._slots_of(lane, pool)]
        return "free" if not held else held[0] if len(held) == 1 else "both"

    def _slots_of(self, lane: Lane, pool: str) -> tuple[int, ...]:
        return lane.blocks if pool == "blocks" else (lane.state,)


def run() -> Story:
    """Two requests, the second of which finds what the first one left behind."""
    from kvcache import Cache, Sizes, preset

    layout = preset(MODEL)
    cache = Cache(layout, Sizes(**SLOTS))
    prefix = range(1, SHARED + 1)
    prompts = {
        "first": [*prefix, *range(1000, 1000 + FIRST - SHARED)],
        "second": [*prefix, *range(5000, 5000 + SECOND - SHARED)],
    }
    lanes, copies = [], []
    for name, prompt in prompts.items():
        admission = cache.admit(name, prompt)
        copies += _told(admission.copies)
        request = admission.request
        while request.length < len(prompt):
            room = cache.manager.room(request, len(prompt) - request.length)
            with cache.step({request: prompt[request.length : request.length + room]}) as step:
                pass  # the layers would write their entries here
            copies += _told((*step.copies, *step.after))
        lanes.append((request, admission.hit))
    kept = {slot for _, _, pool, slot in copies if pool == "checkpoints"}
    found = [
        Lane(request.name, request.length, hit, tuple(request.blocks), request.state)
        for request, hit in lanes
    ]
    sizes = {"blocks": layout.block_bytes, "states": layout.state_bytes,
             "checkpoints": layout.checkpoint_bytes}  # fmt: skip
    slots = {name: count + (name in RESERVED) for name, count in SLOTS.items()}
    return Story(MODEL, layout.block_tokens, tuple(found), slots, sizes, tuple(copies),
                 tuple(sorted(kept)))  # fmt: skip


def source() -> str:
    """Return what the run depends on: the model's sizes and the requests."""
    from kvcache import preset

    layout = preset(MODEL)
    sizes = layout.block_tokens, layout.block_bytes, layout.state_bytes, layout.checkpoint_bytes
    return f"{MODEL} {sizes} {SHARED} {FIRST} {SECOND} {SLOTS}"


def _told(copies: Iterable[Any]) -> list[tuple[str, int, str, int]]:
    """Pools by name; zeros for a new state are left out."""
    found = [(copy.source.value, copy.source_slot, copy.target.value, copy.target_slot)
             for copy in copies]  # fmt: skip
    return [each for each in found if each[0] not in RESERVED or each[1]]


# -- the picture ----------------------------------------------------------------------------------


def draw(path: Path, story: Story, source: str = "") -> None:
    """Requests above, pools below, copies as arrows."""
    how = {
        "height": 4.8,
        "title": "kvcache: two requests that share a prefix",
        "caption": f"A run of kvcache.Cache on a CPU, layout of {story.model} (fp8 entries), one "
        f"block table for all layers, {story.block_tokens} tokens per block.\nNumbers are slots. "
        "The second request reads the first two blocks of the first one in place",
        "keys": 1,
    }
    with style.picture(path, source=source, **how) as (figure, ((axis,),)):
        places = _pools(axis, story)
        _lanes(axis, story)
        _arrows(axis, story, places)
        axis.set_xlim(-3.4, 13.4)
        axis.set_ylim(-5.5, 2.9)
        axis.set_axis_off()
        words = {"first": "of the first request", "second": "of the second", "both": "of both",
                 "kept": "checkpoint", "free": "free"}  # fmt: skip
        style.legend(figure, [_patch(name, label) for name, label in words.items()])


def _patch(name: str, label: str) -> Any:
    from matplotlib.patches import Patch

    colour, hatch = FACES[name]
    how = {"facecolor": colour, "hatch": hatch, "edgecolor": style.BLACK, "linewidth": 0.8}
    return Patch(label=label, **how)


def _box(axis: Axes, x: float, y: float, size: tuple[float, float], face: str) -> None:
    from matplotlib.patches import Rectangle

    colour, hatch = FACES[face]
    how = {"facecolor": colour, "hatch": hatch, "edgecolor": style.BLACK, "linewidth": 0.8}
    axis.add_patch(Rectangle((x, y), *size, **how))


def _label(axis: Axes, x: float, y: float, words: str, **how: Any) -> None:
    """On white, so that a hatch does not run through it."""
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85}
    axis.text(x, y, words, **{"ha": "center", "va": "center", "fontsize": style.TEXT, **how},
              bbox=box if how.get("ha", "center") == "center" else None)  # fmt: skip


def _lanes(axis: Axes, story: Story) -> None:
    """Each request as its tokens, cut into blocks."""
    for number, lane in enumerate(story.lanes):
        y = 1.75 - 1.45 * number
        words = f"{lane.name} request\n{lane.tokens} tokens, {lane.hit} found"
        _label(axis, -0.25, y + LANE / 2, words, ha="right", linespacing=1.3)
        for at, slot in enumerate(lane.blocks):
            tokens = min(lane.tokens - at * story.block_tokens, story.block_tokens)
            share = tokens / story.block_tokens
            _box(axis, at * BLOCK, y, (BLOCK, LANE), "free")
            _box(axis, at * BLOCK, y, (BLOCK * share, LANE), story.holder("blocks", slot))
            words = f"block {slot}" if share == 1 else f"block {slot}: {tokens}"
            _label(axis, (at + 0.5) * BLOCK, y + LANE / 2, words)
        if lane.state >= 0:
            x = len(max((lane.blocks for lane in story.lanes), key=len)) * BLOCK + 0.5
            _box(axis, x, y, (BLOCK, LANE), lane.name)
            _label(axis, x + BLOCK / 2, y + LANE / 2, f"state {lane.state}")


def _pools(axis: Axes, story: Story) -> dict[tuple[str, int], tuple[float, float]]:
    """A row of slots for each pool; returns the middle of every slot."""
    places = {}
    for number, (pool, count) in enumerate(story.slots.items()):
        y = -1.75 - 1.75 * number
        size = f"{story.sizes[pool] / 2**20:.2f} MiB each"
        _label(axis, -0.25, y + POOL / 2, f"{pool}\n{size}", ha="right", linespacing=1.3)
        for slot in range(count):
            x = slot * 1.5
            face = story.holder(pool, slot)
            _box(axis, x, y, (1.3, POOL), face)
            words = RESERVED.get(pool, "0") if slot == 0 else str(slot)
            _label(axis, x + 0.65, y + POOL / 2, words)
            places[pool, slot] = (x + 0.65, y + POOL / 2)
    return places


def _arrows(axis: Axes, story: Story, places: dict[tuple[str, int], tuple[float, float]]) -> None:
    """Copies between slots, in their order."""
    for number, (pool, slot, to, target) in enumerate(story.copies, start=1):
        if (pool, slot) not in places or (to, target) not in places:
            continue
        (x, y), (x2, y2) = places[pool, slot], places[to, target]
        down = POOL / 2 if y > y2 else -POOL / 2
        arrow = {"arrowstyle": "-|>", "linewidth": 1.6, "color": style.BLACK, "shrinkA": 0,
                 "shrinkB": 0}  # fmt: skip
        axis.annotate("", (x2, y2 + down), (x, y - down), arrowprops=arrow)
        _label(axis, (x + x2) / 2, (y + y2) / 2, str(number), fontsize=style.SMALL, weight="bold")
        words = COPIES.get((pool, to), f"{pool} {{}} to {to} {{}}").format(slot, target)
        axis.text(6.3, -3.1 - 0.55 * number, f"{number}  {words}", fontsize=style.TEXT, va="center")
    axis.text(6.3, -3.0, "Copies, in order", fontsize=style.TEXT, weight="bold", va="center")
