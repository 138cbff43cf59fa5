"""Limits that several packages share: of positions, and of fp32."""

MAX_POSITION = 1 << 29  # offset + row + window and the like then stay within an int32
UNBOUNDED = (1 << 30) - 1  # as good as any larger window
FLT_MIN, FLT_MAX = 2.0**-126, float.fromhex("0x1.fffffep127")  # normal numbers of fp32
MAX_TREE_TOKENS = 64  # draft tokens of an entry: bits of a word
