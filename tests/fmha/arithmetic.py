"""What fits, worked out by hand beside `fmha.layout`: bytes, columns and rules from the design.

Nothing of fmha is imported, so that a mistake there is not repeated here.
"""

from __future__ import annotations

from typing import Any

SMEM_LIMIT = 232_448
KIB = 1024

# head_dim -> (bytes of a K piece in a CTA, pieces of a K tile); v_dim -> the same for V.
# 128 keys by the columns of a piece, 2 bytes each; in the pair of 512 a CTA has 64 keys of K
# (x 256 columns) and 64 of the 128 columns of V.
K_PIECES = {
    64: (16 * KIB, 1), 96: (24 * KIB, 1), 128: (32 * KIB, 1),
    192: (16 * KIB, 3), 256: (32 * KIB, 2), 512: (32 * KIB, 2),
}  # fmt: skip
V_PIECES = {
    64: (16 * KIB, 1), 96: (24 * KIB, 1), 128: (32 * KIB, 1),
    256: (32 * KIB, 2), 512: (16 * KIB, 4),
}  # fmt: skip
OUT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def barriers(config: Any, k_stages: int, v_stages: int) -> int:
    """mbarriers: a ring has two per stage, S and P one per stage of two, Q and O one per tile."""
    tiles = _tiles(config)
    count = 2 * (k_stages + v_stages) + 2 * 2 + 2 * tiles
    if tiles == 2:
        count += 2 + 2 * 2  # O is rescaled; the numbers of a row, a ring of one stage per tile
    if config.kv_lens or config.varlen_k or config.page_size or config.q_offset:
        count += 1  # the tile with the end of the keys
    if not config.pack_heads:
        count += tiles * V_PIECES[_v_dim(config)][1]  # a piece of O is stored once it is written
    return count


def shared_bytes(config: Any, k_stages: int, v_stages: int) -> int:
    """Shared memory of a CTA: barriers and the like, rounded up to 1 KiB, then whole KiB."""
    rows = 64 if config.head_dim == 512 else 128 * _tiles(config)
    front = 8 * barriers(config, k_stages, v_stages) + 4
    if config.head_dim == 512 or _tiles(config) == 2:
        front = -(-front // 16) * 16 + 4 * 128 * 4  # four numbers of each of 128 lanes
    p = rows * 128 * 2 if _p_in_smem(config) else 0
    rings = k_stages * K_PIECES[config.head_dim][0] + v_stages * V_PIECES[_v_dim(config)][0]
    return -(-front // KIB) * KIB + rows * config.head_dim * 2 + rings + p


def columns(config: Any) -> int:
    """TMEM columns to allocate: two S of 128 columns and an O per tile, half of each in a pair."""
    needed = 2 * 128 + _v_dim(config) * _tiles(config)
    if config.head_dim == 512:
        needed //= 2
    return next(size for size in (32, 64, 128, 256, 512, 1024, 2048) if size >= needed)


def broken_rules(config: Any) -> list[str]:
    """A word of the message for every rule that the config breaks; none for one that runs."""
    found = []
    if config.dtype not in ("bf16", "fp16"):
        found.append(f"dtype {config.dtype!r}")
    if config.out_dtype not in ("", "bf16", "fp16", "fp32"):
        found.append(f"out_dtype {config.out_dtype!r}")
    if config.p_path not in ("", "tmem", "smem"):
        found.append(f"p_path {config.p_path!r}")
    if config.schedule not in ("", "base", "pingpong"):
        found.append(f"schedule {config.schedule!r}")
    if config.page_size not in (0, 8, 16, 32, 64, 128, 256, 512, 1024):
        found.append(f"page_size {config.page_size}")
    if not 0 <= config.rescale_log2 <= 15:
        found.append(f"rescale_log2 {config.rescale_log2}")
    if config.sink_tokens and not config.left:
        found.append("sink_tokens without")
    if config.sinks and not config.normalize:
        found.append("sinks with normalize=False")
    if config.page_size and not config.kv_lens:
        found.append("pages without kv_lens")
    if config.page_size and config.varlen_k:
        found.append("pages and cu_seqlens_k")
    if config.rope_dim not in range(0, _v_dim(config) + 1, 2):
        found.append(f"rope_dim {config.rope_dim}")
    found += [
        f"{name} {getattr(config, name)}"
        for name in ("k_stages", "v_stages")
        if getattr(config, name) < 0
    ]
    return found + _misfits(config)


def _misfits(config: Any) -> list[str]:
    """The rules that need known sizes."""
    pairs = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512))
    if (config.head_dim, _v_dim(config)) not in pairs:
        return [f"head_dim {config.head_dim} with v_head_dim {_v_dim(config)}"]
    found = []
    if config.head_dim == 512 and config.p_path == "tmem":
        found.append("p_path 'tmem' at head_dim 512")
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
    rows = 64 if config.head_dim == 512 else 128 * _tiles(config)
    front = -(-8 * barriers(config, k_stages, v_stages) // KIB) * KIB
    if rows * _v_dim(config) * _o_bytes(config) > shared_bytes(config, k_stages, v_stages) - front:
        found.append("behind the last buffer")
    return found


def _tiles(config: Any) -> int:
    """Query tiles that a CTA keeps in flight."""
    return 2 if config.schedule == "pingpong" else 1


def _v_dim(config: Any) -> int:
    return config.v_head_dim or config.head_dim


def _o_bytes(config: Any) -> int:
    default = config.dtype if config.normalize else "fp32"
    return OUT_BYTES.get(config.out_dtype or default, 4)


def _p_in_smem(config: Any) -> bool:
    return config.p_path == "smem" or config.head_dim == 512
