"""Limits of positions that attention and the cache share."""

MAX_POSITION = 1 << 29  # offset + row + window and the like then stay within an int32
UNBOUNDED = (1 << 30) - 1  # as good as any larger window
