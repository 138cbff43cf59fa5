"""What a compressor's kernels are compiled for, and which thread does what, as data.

Raw: a thread has VECTOR channels of up to ROWS rows of a window; `lanes` threads side by side have
the same rows of `channels` channels, `groups` of them all rows. Windows of many rows are cut over a
cluster of CTAs by channels, so that few of them still fill the GPU. What a thread computes of
which rows depends on their places in the window alone, not on where a row comes from.

Online: a CTA has `channels` channels of a window, or of a request; it brings the rows of a window
to shared memory all at once, and a thread then walks them for a channel, one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fmha.sparse.indexer.formats import FORMATS, WIDTH
from kernelkit import hw
from kvcache.layouts.latent import LATENTS

VECTOR = 4  # channels of a thread: 16 bytes
ROWS = 8  # at most, of a thread
MOST_ROWS = 256
CHANNELS = 64  # of a CTA, where a window is cut
SMALL_THREADS = 64  # of a CTA with small windows
THREADS = 128  # of one that walks rows
STAGED = 128  # rows of an online tail's window in shared memory, at most
BATCHES = 4  # of them, at most
BOXES = 2  # for sums over a cluster
RECORDS = (*LATENTS, *FORMATS)


def exchange_bytes(ctas: int) -> int:
    """Of shared memory, for sums over so many CTAs: parts and a barrier of each box."""
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
        """Of a row of values, or of scores."""
        return self.overlap * self.width


@dataclass(frozen=True)
class WindowConfig(EntryConfig):
    """Raw tails. chunk: most windows lie in the step as a whole, so rows are loaded from there
    before anybody knows whose they are."""

    chunk: bool = False

    @property
    def rows(self) -> int:
        """Of all windows of an entry."""
        return self.overlap * self.ratio

    @property
    def group_rows(self) -> int:
        """Of a thread."""
        return min(self.rows, ROWS)

    @property
    def groups(self) -> int:
        """Threads that share a channel."""
        return self.rows // self.group_rows

    @property
    def channels(self) -> int:
        """Of a CTA."""
        return self.width if self.groups == 1 else CHANNELS

    @property
    def slices(self) -> int:
        """CTAs of a window: a cluster."""
        return self.width // self.channels

    @property
    def lanes(self) -> int:
        """Threads of a group."""
        return self.channels // VECTOR

    @property
    def window_threads(self) -> int:
        """Of a window in a CTA."""
        return self.groups * self.lanes

    @property
    def window_warps(self) -> int:
        """Of a window in a CTA."""
        return self.window_threads // hw.WARP_THREADS

    @property
    def windows(self) -> int:
        """Of a CTA."""
        return max(1, SMALL_THREADS // self.window_threads)

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return self.windows * self.window_threads

    @property
    def smem_bytes(self) -> int:
        """Of a CTA, at most: rows, pooled channels, sums of CTAs and of warps."""
        rows = self.threads * self.group_rows * 2 * VECTOR
        sums = 4 * self.threads // hw.WARP_THREADS + exchange_bytes(self.slices)
        return 4 * (rows + self.channels) + sums

    @property
    def ctas_per_sm(self) -> int:
        """That are there at the same time: all clusters of a chunk of 4,096 tokens, C128."""
        ctas = 5 if self.groups == 1 else 3
        return ctas if self.chunk else ctas - 1

    @property
    def row_threads(self) -> int:
        """That save a row."""
        return min(self.threads, self.columns // VECTOR)

    @property
    def saved_rows(self) -> int:
        """Of a CTA that saves rows."""
        return self.threads // self.row_threads

    def clusters(self, ends: int, saved: int) -> tuple[int, int]:
        """(clusters with windows, clusters in all) for so many ends and rows to save."""
        windows = -(-ends // self.windows)
        return windows, windows + -(-saved // (self.saved_rows * self.slices))


@dataclass(frozen=True)
class WalkConfig(EntryConfig):
    """Online tails: clusters walk all tokens of a request, or, of a chunk, a window each, and the
    last tokens of a request beside them. staged: rows in shared memory."""

    staged: int
    chunk: bool = False
    channels: int = CHANNELS  # of a CTA
    threads: int = THREADS
    windows: ClassVar[int] = 1  # of a CTA

    @property
    def slices(self) -> int:
        """CTAs of a cluster."""
        return self.width // self.channels

    @property
    def smem_bytes(self) -> int:
        """Of a CTA: values and scores of rows, pooled channels, where the state after a row goes,
        sums of CTAs."""
        rows = (2 * self.rows + 1) * self.channels + self.rows
        return 4 * rows + exchange_bytes(self.slices)

    @property
    def ctas_per_sm(self) -> int:
        """That are there at the same time: all clusters of a chunk of 4,096 tokens."""
        return 3

    @property
    def row_lanes(self) -> int:
        """Threads that bring a row."""
        return self.channels // VECTOR

    @property
    def lines(self) -> int:
        """Rows that all threads bring at a time: a turn."""
        return self.threads // self.row_lanes

    @property
    def turns(self) -> int:
        """In which staged rows are brought."""
        return -(-self.staged // self.lines)

    @property
    def rows(self) -> int:
        """There is room for."""
        return self.turns * self.lines

    @property
    def batch_turns(self) -> int:
        """Turns of a batch of rows that are walked while others are on their way; the last batch
        may have fewer."""
        return -(-self.turns // BATCHES)

    @property
    def batches(self) -> int:
        """Of all turns."""
        return -(-self.turns // self.batch_turns)


def refused(config: EntryConfig, *, online: bool) -> str | None:
    """What of a compressor no kernel here has; None where all is well."""
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
