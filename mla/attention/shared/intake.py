"""How threads bring entries of the cache into panels of K and V. Plain data.

A panel has 64 columns of 64 keys in bf16, lines of 128 bytes that are swizzled as TMA does. V has
eight panels, in two halves.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelkit.plan import hw
from mla.attention.config import Keys
from mla.attention.formats import LATENT, Form

PANEL = 64  # columns of a panel
PANEL_KEYS = 64
LINE_BYTES = PANEL * 2
PANEL_BYTES = PANEL_KEYS * LINE_BYTES
PANELS = LATENT // PANEL  # of V
HALF = PANELS // 2
CHUNK = 16  # bytes that a gathering lane moves at a time


@dataclass(frozen=True)
class Spread:
    """Division of a warp's entries among its lanes.

    lanes: lanes that share an entry.
    rows: entries of the warp.
    """

    lanes: int
    rows: int

    @property
    def at_once(self) -> int:
        """Entries that the warp reads at a time."""
        return hw.WARP_THREADS // self.lanes

    @property
    def turns(self) -> int:
        """Entries of a lane."""
        return self.rows // self.at_once


@dataclass(frozen=True)
class Intake:
    """How threads bring the entries of a source into a tile.

    which: number of the source.
    crosses: whether another CTA gets what this one converts, see `config.Ways`.
    whole: whether a lane holds all its chunks of a half of a tile, else half of them.
    holds_wide: whether columns in bf16 next to codes go through registers; else by cp.async.
    halves: whether entries become fp16, see `sm90/halves.py`; else bf16.
    """

    which: int
    keys: Keys
    spread: Spread
    crosses: bool = False
    whole: bool = False
    holds_wide: bool = False
    halves: bool = False

    @property
    def form(self) -> Form:
        return self.keys.form

    @property
    def converts(self) -> bool:
        """Whether entries go through registers; else cp.async brings them as they are."""
        return bool(self.form.code)

    @property
    def chunks(self) -> int:
        """Chunks of 16 bytes that a lane has of half an entry."""
        bits = {"e4m3": 8, "e2m1": 4}[self.form.code]
        return HALF * PANEL * bits // 8 // CHUNK // self.spread.lanes

    @property
    def depth(self) -> int:
        """Turns whose chunks a lane holds."""
        return self.spread.turns if self.whole else max(self.spread.turns // 2, 1)

    @property
    def has_unit(self) -> bool:
        """Whether an entry is divided by a power of two, so that it is in the range of fp16."""
        return self.halves and self.form.scale in ("fp32", "ue8m0")

    @property
    def may_round(self) -> bool:
        """Whether a code times its scale may have to be rounded to bf16 first."""
        return self.halves and self.form.scale == "fp32"

    @property
    def copies_wide(self) -> bool:
        """Whether cp.async brings columns in bf16 next to codes."""
        return bool(self.form.code and self.form.wide and not self.stores_rest)

    @property
    def stores_rest(self) -> bool:
        """Whether a panel beside the codes goes through registers: to the other CTA by stores,
        since P overwrites the ninth panel, and so might overwrite what a bulk copy still reads.
        """
        return (self.crosses and self.rest_panel == PANELS) or self.holds_wide

    @property
    def crosses_rest(self) -> bool:
        """Whether that panel goes to the other CTA by stores."""
        return self.stores_rest and self.crosses

    @property
    def rest(self) -> str:
        """Kind of the panel beside the halves that goes through registers: '', 'coded', 'wide'."""
        if self.form.coded > LATENT:
            return "coded"
        return "wide" if self.stores_rest and self.form.wide > 0 else ""

    @property
    def rest_in_turns(self) -> bool:
        """Whether that panel is converted with the others of an entry; else behind all of them."""
        return self.halves and self.rest == "coded"

    @property
    def rest_turns(self) -> int:
        """Turns whose chunks of that panel a lane holds."""
        return 1 if self.rest_in_turns else self.spread.turns

    @property
    def rest_panel(self) -> int:
        """Panel that is no part of the codes of the two halves."""
        return min(self.form.coded, LATENT) // PANEL
