"""Sizes that fit, computed by hand, to compare with `fmha.sm100.layout`: bytes, columns and rules.

Nothing of fmha is imported, so that a mistake there is not repeated here.
"""

from __future__ import annotations

from typing import Any

SMEM_LIMIT = 232_448
KIB = 1024

# head_dim -> (bytes of a K piece in a CTA, pieces of a K tile); v_dim -> the same for V. A piece is
# 128 keys by its columns, 2 bytes each. In a pair a CTA has 64 keys of K, by 128 columns at 256 and
# by 256 at 512, and half the columns of V, of which 256 are a piece.
K_PIECES = {
    64: (16 * KIB, 1), 96: (24 * KIB, 1), 128: (32 * KIB, 1),
    192: (16 * KIB, 3), 256: (16 * KIB, 2), 512: (32 * KIB, 2),
}  # fmt: skip
V_PIECES = {
    64: (16 * KIB, 1), 96: (24 * KIB, 1), 128: (32 * KIB, 1),
    256: (32 * KIB, 1), 512: (32 * KIB, 2),
}  # fmt: skip
OUT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "e4m3": 1}


def barriers(config: Any, k_stages: int, v_stages: int) -> int:
    """Number of mbarriers: a ring has two per stage; S and P have one, plus one for the rest of P
    if it comes in two parts.
    """
    tiles, s_stages = _tiles(config), _s_stages(config)
    count = 2 * (k_stages + v_stages + 3 * tiles) + 2 * s_stages  # Q, O, numbers of a row
    if tiles == 2 and s_stages == 2:
        count += s_stages
    if config.kv_lens or config.varlen_k or config.page_size or config.q_offset:
        count += 2  # the tile with the end of the keys
    return count + 2 * _out_stages(config)


def shared_bytes(config: Any, k_stages: int, v_stages: int) -> int:
    """Shared memory of a CTA in bytes: barriers and row numbers, rounded up to 1 KiB, then whole
    KiB.
    """
    front = -(-(8 * barriers(config, k_stages, v_stages) + 4) // 16) * 16 + _numbers(config)
    rings = k_stages * K_PIECES[config.head_dim][0] + v_stages * V_PIECES[_v_dim(config)][0]
    out = _out_stages(config) * _panel_bytes(config)
    return -(-front // KIB) * KIB + _rows_bytes(config) + rings + out


def columns(config: Any) -> int:
    """TMEM columns to allocate: an O per tile (half of one at 512), and the stages of S."""
    needed = _s_stages(config) * _s_columns(config) + _o_columns(config)
    return next(size for size in (32, 64, 128, 256, 512, 1024, 2048) if size >= needed)


def _s_columns(config: Any) -> int:
    return 64 if config.head_dim == 512 else 128


def _o_columns(config: Any) -> int:
    return 256 if config.head_dim == 512 else _v_dim(config) * _tiles(config)


def _s_stages(config: Any) -> int:
    """Three stages if they fit next to O, else two."""
    return 3 if 3 * _s_columns(config) + _o_columns(config) <= 512 else 2


def _numbers(config: Any) -> int:
    """Bytes of two numbers per row, plus three at 512, through which the halves of a row are
    combined.
    """
    return (2 * _tiles(config) + (3 if config.head_dim == 512 else 0)) * 128 * 4


def _rows_bytes(config: Any) -> int:
    """Bytes of Q and, at 512, of P."""
    rows = 64 if config.head_dim == 512 else 128 * _tiles(config)
    return rows * config.head_dim * 2 + (rows * 128 * 2 if config.head_dim == 512 else 0)


def _panel_bytes(config: Any) -> int:
    """Bytes of 128 rows of O, each of the most bytes up to 128 that divide a row."""
    row = _v_dim(config) * _o_bytes(config)
    return 128 * next(line for line in (128, 64, 32) if row % line == 0)


def _out_stages(config: Any) -> int:
    """Two panels, or one if two do not fit next to the smallest rings and 1 KiB of barriers."""
    k_stages = config.k_stages or K_PIECES[config.head_dim][1]
    v_stages = config.v_stages or V_PIECES[_v_dim(config)][1]
    rings = k_stages * K_PIECES[config.head_dim][0] + v_stages * V_PIECES[_v_dim(config)][0]
    taken = KIB + _numbers(config) + _rows_bytes(config) + rings
    return 2 if taken + 2 * _panel_bytes(config) <= SMEM_LIMIT else 1


def broken_rules(config: Any) -> list[str]:
    """Return a word of the message for every rule that the config breaks; none for a valid
    config.
    """
    found = []
    if config.dtype not in ("bf16", "fp16"):
        found.append(f"dtype {config.dtype!r}")
    if config.out_dtype not in ("", *OUT_BYTES):
        found.append(f"out_dtype {config.out_dtype!r}")
    if config.out_dtype == "e4m3" and not config.normalize:
        found.append("e4m3 with normalize=False")
    if config.schedule not in ("", "base", "pingpong"):
        found.append(f"schedule {config.schedule!r}")
    if config.page_size < 0 or config.page_size % 8:
        found.append(f"page_size {config.page_size}")
    if config.group < 1:
        found.append(f"group {config.group}")
    if config.rescale_log2 != -1 and not 0 <= config.rescale_log2 <= 15:
        found.append(f"rescale_log2 {config.rescale_log2}")
    if config.sink_tokens and not config.left:
        found.append("sink_tokens without")
    if config.sinks and not config.normalize:
        found.append("sinks with normalize=False")
    if config.page_size and not config.kv_lens:
        found.append("pages without kv_lens")
    if config.page_size and config.varlen_k:
        found.append("pages conflict with cu_seqlens_k")
    if config.rope_dim not in range(0, _v_dim(config) + 1, 2):
        found.append(f"rope_dim {config.rope_dim}")
    found += [
        f"{name} {getattr(config, name)}"
        for name in ("k_stages", "v_stages")
        if getattr(config, name) < 0
    ]
    return found + _misfits(config)


def _misfits(config: Any) -> list[str]:
    """Check the rules that need known sizes."""
    pairs = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512))
    if (config.head_dim, _v_dim(config)) not in pairs:
        return [f"head_dim {config.head_dim} with v_head_dim {_v_dim(config)}"]
    found = []
    if _tiles(config) == 2 and config.head_dim not in (64, 96, 128):
        found.append(f"schedule 'pingpong' at head_dim {config.head_dim}")
    if columns(config) > 512:
        found.append(f"{columns(config)} TMEM columns")
    # A ring that is left free has at least one tile.
    k_stages = config.k_stages or K_PIECES[config.head_dim][1]
    v_stages = config.v_stages or V_PIECES[_v_dim(config)][1]
    if k_stages < 0 or v_stages < 0:
        return found
    if v_stages < V_PIECES[_v_dim(config)][1]:
        found.append(f"v_stages {v_stages}: at least")
    if shared_bytes(config, k_stages, v_stages) > SMEM_LIMIT:
        found.append(f"{shared_bytes(config, k_stages, v_stages)} bytes of shared memory")
    return found


def _tiles(config: Any) -> int:
    """Query tiles that a CTA keeps in flight."""
    return 2 if config.schedule == "pingpong" else 1


def _v_dim(config: Any) -> int:
    return config.v_head_dim or config.head_dim


def _o_bytes(config: Any) -> int:
    default = config.dtype if config.normalize else "fp32"
    return OUT_BYTES.get(config.out_dtype or default, 4)
