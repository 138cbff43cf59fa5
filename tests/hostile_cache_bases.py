"""Right calls of the KV cache and of Q8_0, for hostile ones to be made of."""

from __future__ import annotations

import functools

import gguf
import torch

import kvcache
import q8_0
from kvcache.layouts.presets import CONFIGS
from kvcache.layouts.records import BF16_512, FP8_584, plain
from q8_0 import reference as q8_0_reference
from q8_0.product.launch import product
from tests.hostile_generator import Base, Given
from tests.hostile_moe_bases import FOLDER
from tests.hostile_values import angles, bf16, normal, positive, some_bytes

POOL_BYTES = 4096


def _pages() -> Given:
    return {"k_pages": bf16(4, 16, 2, 64), "v_pages": bf16(4, 16, 2, 64), "k": bf16(3, 2, 64),
            "v": bf16(3, 2, 64), "slots": torch.tensor([1, 17, -1])}  # fmt: skip


def _fp8_pages() -> Given:
    pages = {name: _pages()[name].to(torch.float8_e4m3fn) for name in ("k_pages", "v_pages")}
    return _pages() | pages | {"k_scale": positive(1), "v_scale": positive(1)}


def _rows(record: kvcache.Record | None = None) -> kvcache.Rows:
    pool = some_bytes(4, POOL_BYTES)
    record = plain("k", 1, 64) if record is None else record
    rows = min(POOL_BYTES // 1024, 4)
    return kvcache.Rows(pool, 0, rows * record.data_bytes, rows, record)


def _append_rows() -> Given:
    return {"first": (_rows(), bf16(3, 64)), "second": None, "slots": torch.tensor([0, 5, -1])}


def _append_swa() -> Given:
    cos, sin = angles(8, 32)
    return {"rows": _rows(BF16_512), "kv": bf16(3, 512), "positions": torch.arange(3),
            "slots": torch.tensor([0, 5, -1]), "cos": cos, "sin": sin}  # fmt: skip


def _gather() -> Given:
    return {"rows": _rows(), "indices": torch.tensor([0, 5, -1]), "out": bf16(3, 64)}


def _dequantising() -> Given:
    return {"rows": _rows(FP8_584), "indices": torch.tensor([0, 5, -1]), "out": bf16(3, 512)}


def _copy_slots() -> Given:
    return {"source": some_bytes(4, 256), "target": some_bytes(4, 256),
            "pairs": torch.tensor([[0, 1], [2, 3]]),
            "segments": torch.tensor([[0, 16, 32]])}  # fmt: skip


def _checksum() -> Given:
    return {"pool": some_bytes(4, 256), "slots": torch.tensor([1, -1]), "begin": 0, "end": 64}


def _admitting() -> Given:
    return {"self": kvcache.Manager(kvcache.gqa(1, 2, 64), kvcache.Sizes(8)), "name": "one",
            "prompt": [1, 2, 3], "salt": b"", "use_cache": True}  # fmt: skip


def _managing() -> Given:
    layout = kvcache.gqa(2, 1, 8, window=4, windowed=(True, False))
    return {"layout": layout, "sizes": kvcache.Sizes(4, 2, checkpoints=1),
            "policy": kvcache.Policy(2)}  # fmt: skip


def _planning() -> Given:
    return {"layout": kvcache.gqa(1, 2, 64), "memory": 1 << 30, "mix": kvcache.Mix((100,))}


def _layout() -> Given:
    stream = kvcache.Stream("kv", plain("k", 1, 64), 1, 2)
    ring = kvcache.Ring("r", plain("k", 1, 64), 4, 1)
    tail = kvcache.Tail("t", 4, 16, 1, overlap=2)
    return {"name": "l", "block_tokens": 8, "streams": (stream,), "rings": (ring,),
            "tails": (tail,), "draft": 2}  # fmt: skip


def _reading() -> Given:
    return {"config": CONFIGS["gpt-oss-120b"], "options": kvcache.Options(draft=1), "name": "some"}


def _weights() -> q8_0.Weights:
    return q8_0_reference.rounded(normal(4, 96), "soa")


def _matvec() -> Given:
    return {"weights": _weights(), "x": bf16(2, 96), "bias": bf16(4)}


def _integers() -> Given:
    return {"weights": _weights(), "x": q8_0_reference.quantise(normal(2, 96))}


def _product() -> Given:
    return {"weights": _weights(), "x": q8_0_reference.quantise(normal(17, 96)),
            "bias": normal(4), "out": normal(17, 4)}  # fmt: skip


def _linear() -> Given:
    return {"self": q8_0.Q8Linear(_weights(), bf16(4)), "x": bf16(17, 96)}


@functools.cache
def _file() -> str:
    """The path of a GGUF file with a matrix 'w' and a bias 'b'."""
    path = f"{FOLDER.name}/some.gguf"
    kind = gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", gguf.quantize(normal(4, 96).numpy(), kind), raw_dtype=kind)
    writer.add_tensor("b", normal(4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


CACHE_BASES = (
    Base("append_pages", kvcache.append_pages, _pages, ("k_pages", "v_pages")),
    Base("append_pages in e4m3", kvcache.append_pages, _fp8_pages, ("k_pages", "v_pages")),
    Base("gather_pages", kvcache.gather_pages, _pages, ("k", "v")),
    Base("append_rows", kvcache.append_rows, _append_rows, ("first/0/pool",)),
    Base("append_swa", kvcache.append_swa, _append_swa, ("rows/pool",)),
    Base("gather", kvcache.gather, _gather, ("out",)),
    Base("gather of records", kvcache.gather, _dequantising, ("out",)),
    Base(
        "copy_slots", kvcache.copy_slots, _copy_slots, ("target",), frozenset({"source", "target"})
    ),
    Base("checksum", kvcache.checksum, _checksum),
    Base("Manager", kvcache.Manager, _managing, computed=None),
    Base("Cache", kvcache.Cache, _managing, computed=None),
    Base("Layout", kvcache.Layout, _layout, computed=None),
    Base("gqa", kvcache.gqa, lambda: {"layers": 2, "heads": 1, "head_dim": 8}),
    Base("from_config", kvcache.from_config, _reading, computed=None),
    Base(
        "preset", kvcache.preset, lambda: {"name": "deepseek-v4-pro", "draft": 2},
        options_of=kvcache.Options, computed=None,
    ),
    Base("usage", kvcache.usage, lambda: {"layout": kvcache.gqa(1, 2, 64), "tokens": 5}),
    Base("Options", kvcache.Options, lambda: {"record": "fp8", "draft": 1}),
    Base("Placeholders", kvcache.Placeholders, lambda: {"count": 3}),
    Base("Record", kvcache.Record, lambda: {"name": "r", "data_bytes": 16}),
    Base("Policy", kvcache.Policy, lambda: {"every": 2}),
    Base("Mix", kvcache.Mix, lambda: {"tokens": (100, 200)}),
    Base("plan", kvcache.plan, _planning, computed=None),
    Base("admit", kvcache.Manager.admit, _admitting, computed=None),
    Base(
        "kvcache.warmup", kvcache.warmup,
        lambda: {"layout": kvcache.gqa(1, 2, 64), "device": "cpu", "dtypes": (torch.bfloat16,)},
        computed=None,
    ),
    Base("repack", q8_0.repack, lambda: {"weights": _weights(), "layout": "interleaved"}),
    Base("dequantise", q8_0.dequantise, lambda: {"weights": _weights()}),
    Base("q8_0.quantise", q8_0.quantise, lambda: {"x": bf16(2, 96)}),
    Base("matvec", q8_0.matvec, _matvec),
    Base("matvec of integers", q8_0.matvec, _integers),
    Base("product", product, _product, ("out",)),
    Base(
        "Q8Linear", q8_0.Q8Linear, lambda: {"weights": _weights(), "bias": bf16(4)}, contents=False,
        computed=None,
    ),
    Base("Q8Linear of tokens", q8_0.Q8Linear.forward, _linear),
    Base("GgufFile", q8_0.GgufFile, lambda: {"path": _file()}, computed=None),
    Base(
        "GgufFile.weights", q8_0.GgufFile.weights,
        lambda: {"self": q8_0.GgufFile(_file()), "name": "w", "layout": "soa"},
    ),
    Base(
        "GgufFile.numbers", q8_0.GgufFile.numbers,
        lambda: {"self": q8_0.GgufFile(_file()), "name": "b"},
    ),
    Base(
        "q8_0.warmup", q8_0.warmup, lambda: {"weights": _weights(), "tokens": (1, 20)},
        contents=False, computed=None,
    ),
)  # fmt: skip
