"""Configs of a compressor's kernels, and the division of work between threads, as data.

Raw: a thread has VECTOR channels of up to ROWS rows of a window. `lanes` neighbouring threads have
the same rows of `channels` channels, and `groups` of such threads have all rows. Windows of many
rows are split over a cluster of CTAs by channels, so that few windows still fill the GPU. Which
rows a thread combines, and how, depends only on their places in the window, not on where a row
comes from.

Online: a CTA has `channels` channels of a window, or of a request. It loads all rows of a window to
shared memory at once; then a thread walks them row by row for one channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernelkit.plan import hw
from kvcache.layouts.latent import LATENTS
from mla.indexer.formats import FORMATS, WIDTH

VECTOR = 4  # channels of a thread: 16 bytes
ROWS = 8  # at most, of a thread
MOST_ROWS = 256
CHANNELS = 64  # of a CTA, if a window is split
SMALL_THREADS = 64  # of a CTA with small windows
THREADS = 128  # of a CTA that walks rows
STAGED = 128  # rows of an online tail's window in shared memory, at most
BATCHES = 4  # at most, of the staged rows
BOXES = 2  # for sums over a cluster
RECORDS = (*LATENTS, *FORMATS)


def exchange_bytes(ctas: int) -> int:
    """Return the shared memory of sums over `ctas` CTAs: the parts and a barrier for each box."""
    return BOXES * (8 + 4 * ctas)


@dataclass(frozen=True)
class EntryConfig:
    """Entries of `width` elements of `record`, from `overlap` windows of `ratio` tokens."""

    record: str
    ratio: int
    overlap: int
    width: int

    @property
    def indexed(self) -> bool:
        """Whether entries are index keys."""
        return self.record in FORMATS

    @property
    def columns(self) -> int:
        """The columns of a row of values, or of scores."""
        return self.overlap * self.width


@dataclass(frozen=True)
class WindowConfig(EntryConfig):
    """Windows of raw rows.

    chunk: whether most windows lie completely in the step, so that rows are loaded from there
    before their requests are known.
    """

    chunk: bool = False

    @property
    def rows(self) -> int:
        """The rows of all windows of an entry."""
        return self.overlap * self.ratio

    @property
    def group_rows(self) -> int:
        """The rows of a thread."""
        return min(self.rows, ROWS)

    @property
    def groups(self) -> int:
        """Number of thread groups that share a channel."""
        return self.rows // self.group_rows

    @property
    def channels(self) -> int:
        """The channels of a CTA."""
        return self.width if self.groups == 1 else CHANNELS

    @property
    def slices(self) -> int:
        """CTAs of a window, which form a cluster."""
        return self.width // self.channels

    @property
    def lanes(self) -> int:
        """The threads of a group."""
        return self.channels // VECTOR

    @property
    def window_threads(self) -> int:
        """The threads of a window in a CTA."""
        return self.groups * self.lanes

    @property
    def window_warps(self) -> int:
        """The warps of a window in a CTA."""
        return self.window_threads // hw.WARP_THREADS

    @property
    def syncs(self) -> bool:
        """Whether the threads of a CTA wait for each other."""
        return self.groups > 1 or self.lanes > hw.WARP_THREADS

    @property
    def windows(self) -> int:
        """The windows of a CTA."""
        return max(1, SMALL_THREADS // self.window_threads)

    @property
    def threads(self) -> int:
        """The threads of a CTA."""
        return self.windows * self.window_threads

    @property
    def smem_bytes(self) -> int:
        """Most shared memory of a CTA: rows, pooled channels, sums of CTAs and of warps."""
        rows = self.threads * self.group_rows * 2 * VECTOR
        sums = 4 * self.threads // hw.WARP_THREADS + exchange_bytes(self.slices)
        return 4 * (rows + self.channels) + sums

    @property
    def ctas_per_sm(self) -> int:
        """CTAs of an SM at a time: all clusters for a chunk of 4,096 tokens at ratio 128."""
        ctas = 5 if self.groups == 1 else 3
        return ctas if self.chunk else ctas - 1

    @property
    def row_threads(self) -> int:
        """The threads that save a row."""
        return min(self.threads, self.columns // VECTOR)

    @property
    def saved_rows(self) -> int:
        """The rows that a CTA without windows saves."""
        return self.threads // self.row_threads

    def clusters(self, ends: int, saved: int) -> tuple[int, int]:
        """Return (clusters with windows, all clusters) for these ends and rows to save."""
        windows = -(-ends // self.windows)
        return windows, windows + -(-saved // (self.saved_rows * self.slices))


@dataclass(frozen=True)
class WalkConfig(EntryConfig):
    """Windows whose running state is kept in the tail. A cluster walks all tokens of a request. In
    a chunk it walks one window, or the last tokens of a request.

    staged: rows in shared memory.
    """

    staged: int
    chunk: bool = False
    channels: int = CHANNELS  # of a CTA
    threads: int = THREADS
    windows: ClassVar[int] = 1  # of a CTA
    syncs: ClassVar[bool] = True  # whether the threads of a CTA wait for each other

    @property
    def slices(self) -> int:
        """The CTAs of a cluster."""
        return self.width // self.channels

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA: values and scores of rows, pooled channels, tail rows for the
        states, sums of CTAs."""
        rows = (2 * self.rows + 1) * self.channels + self.rows
        return 4 * rows + exchange_bytes(self.slices)

    @property
    def ctas_per_sm(self) -> int:
        """CTAs of an SM at a time: all clusters for a chunk of 4,096 tokens."""
        return 3

    @property
    def row_lanes(self) -> int:
        """Threads that load a row."""
        return self.channels // VECTOR

    @property
    def lines(self) -> int:
        """Rows that all threads load at a time: a turn."""
        return self.threads // self.row_lanes

    @property
    def turns(self) -> int:
        """Turns in which staged rows are loaded."""
        return -(-self.staged // self.lines)

    @property
    def rows(self) -> int:
        """Number of rows with room in shared memory."""
        return self.turns * self.lines

    @property
    def batch_turns(self) -> int:
        """Turns of a batch; the rows of a batch are walked while later ones are in flight. The last
        batch may have fewer turns."""
        return -(-self.turns // BATCHES)

    @property
    def batches(self) -> int:
        """Number of batches in all turns."""
        return -(-self.turns // self.batch_turns)


def refused(config: EntryConfig, *, online: bool) -> str | None:
    """Return why no kernel here supports a compressor, None if one does."""
    elements = WIDTH if config.indexed else LATENTS[config.record].elements
    rows = config.overlap * config.ratio
    windows = f"{config.overlap} windows of {config.ratio} rows"
    if config.width != elements:
        return f"width {config.width}: entries of {config.record} have {elements} elements"
    if config.width % CHANNELS:
        return f"width {config.width}: a multiple of {CHANNELS}"
    if online and config.overlap != 1:
        return f"{windows}, online: 1 window"
    if config.indexed and (online or rows > ROWS):
        return f"{windows} for index keys{', online' * online}: up to {ROWS} rows, not online"
    if not online and rows > ROWS and rows % ROWS:
        return f"{windows}: up to {ROWS} rows, or a multiple of it"
    if not online and rows > MOST_ROWS:
        return f"{windows}: limit {MOST_ROWS} rows"
    return None
