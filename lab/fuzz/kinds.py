"""Kinds of files that others may have written: valid samples of each kind, its reader, and the
errors that the reader may raise."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ptxemu
from cycle_model.parameters import parameter as cycle_parameters
from kernelkit.compile import aot
from kernelkit.compile.artifact import Artifact, ArtifactError
from kernelkit.compile.host_object import HostObject, LoadedObject, ObjectError
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.store import Store
from kernelkit.tune import files as tuned_files
from kvcache.layouts.presets import from_config as cache_of
from kvcache.movement.config import ChecksumConfig
from lab.bringup import where
from lab.bringup.session import Record, Session
from lab.fuzz import damage
from lab.fuzz.damage import BINARY, JSON, TEXT, Damage
from lab.house.source import ROOT
from moe import checkpoint
from moe.huggingface import INDEX, Checkpoint
from moe.models import CONFIGS
from moe.models import from_config as experts_of
from moe.packing import PackedExperts, pack
from ptxemu.kept import Kept
from ptxemu.machine import tensor_map
from ptxemu.module import Module
from ptxemu.trace import Trace
from q8_0 import GgufFile

Samples = Callable[[Path], list[bytes]]
FORMATS = ("F32", "F16", "Q8_0")
_EMULATOR = (ptxemu.PtxEmuError,)
_SECONDS = 1.0  # of a launch
KEY = KernelKey("kvcache.movement.checksum_kernel", ChecksumConfig(), "sm_100a")


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    samples: valid files, made in a folder.
    read: reads a damaged file, which it writes to the given folder.
    errors: errors that it may raise; each names the file and what is wrong."""

    name: str
    samples: Samples
    read: Callable[[Path, bytes], Any]
    damages: tuple[Damage, ...]
    errors: tuple[type[Exception], ...] = (ValueError,)


def _written(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def _json(*contents: Any) -> Samples:
    return lambda _: [json.dumps(content).encode() for content in contents]


# ---- weights


def _ggufs(folder: Path) -> list[bytes]:
    import gguf

    kind, found = gguf.GGMLQuantizationType.Q8_0, []
    for number in range(2):
        path = folder / "sample.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint32("llama.context_length", 4096)
        writer.add_array("tokens", ["a", "word", ""])
        writer.add_array("scores", [0.5, 1.5])
        if number:
            writer.add_custom_alignment(64)
        rows = gguf.quantize(np.ones((3, 64), np.float32), kind)
        writer.add_tensor("w", rows, raw_dtype=kind)
        writer.add_tensor("bias", np.arange(6, dtype=np.float32).reshape(2, 3))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        found.append(path.read_bytes())
    return found


def _read_gguf(folder: Path, data: bytes) -> None:
    file = GgufFile(_written(folder, "file.gguf", data))
    for name in file.names[:8]:
        kind = file.format_of(name)
        if kind in FORMATS:
            (file.weights if kind == "Q8_0" else file.numbers)(name)


def _safetensors(folder: Path) -> list[bytes]:
    found = []
    for fmt, biased in (("mxfp8", False), ("nvfp4", True)):
        checkpoint.save(folder / "sample", {"layer": _packed(fmt, biased)})
        found.append((folder / "sample").read_bytes())
    return found


@cache
def _packed(fmt: str, biased: bool) -> PackedExperts:
    biases = (torch.ones(1, 128), torch.ones(1, 64)) if biased else None
    return pack(torch.ones(1, 128, 64), torch.ones(1, 64, 64), fmt, biases=biases)


def _read_checkpoint(folder: Path, data: bytes) -> None:
    with Checkpoint(_written(folder, "file.safetensors", data)) as file:
        for name in ("layer.w13.data", "layer.layout"):
            if name in file:
                file.shape(name)
                file.tensor(name)


def _read_index(folder: Path, data: bytes) -> None:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    if not (model / "one.safetensors").exists():
        (model / "one.safetensors").write_bytes(_safetensors(folder)[0])
    _written(model, INDEX, data)
    with Checkpoint(model) as file:
        file.tensor("layer.w13.data")


def _layouts(_: Path) -> list[bytes]:
    packed = [_packed(fmt, biased) for fmt in ("mxfp8", "nvfp4") for biased in (False, True)]
    return [json.dumps(checkpoint.layout_of(each)).encode() for each in packed]


def _read_layout(_: Path, data: bytes) -> None:
    stored = torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8)
    layout = checkpoint.read_layout("layer.layout", stored)
    packed = _packed("nvfp4" if layout["fmt"] == "nvfp4" else "mxfp8", True)
    checkpoint.of_layout(layout, checkpoint.state_dict(packed))


# ---- configs


_CACHES = (
    {"model_type": "llama", "num_hidden_layers": 4, "num_key_value_heads": 2, "hidden_size": 256,
     "num_attention_heads": 4, "layer_types": ["full_attention", "sliding_attention"] * 2,
     "sliding_window": 128},
    {"model_type": "deepseek_v4", "num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4],
     "head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "sliding_window": 128},
    {"model_type": "deepseek_v3", "num_hidden_layers": 3, "kv_lora_rank": 512,
     "qk_rope_head_dim": 64, "text_config": None},
)  # fmt: skip


def _read_experts(_: Path, data: bytes) -> None:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError("what json refuses is the caller's") from error
    experts_of(content)


# ---- of kernels

_PLACE = tuned_files.Place("op", tuned_files.Machine("GPU", 1, "sm_90a", "1.2"), "sources")
_ENTRY = tuned_files.Entry({"rows": 1}, {"tile": 2}, 1.0, 2.0, (({"tile": 1}, 3.0),), 1e9)
_ARTIFACT = Artifact("f", "sm_100a", "ptx", b"host", [{"kind": "tensor"}], {"words": "x"})


def _read_manifest(folder: Path, data: bytes) -> None:
    _written(folder, aot.MANIFEST, data)
    was = dict(aot._ready)
    try:
        aot.load(folder, trust=True)
    finally:
        aot._ready.clear()
        aot._ready.update(was)


WORDS = "kernelkit.device.words"  # a module that kernels are traced from


def _manifests(_: Path) -> list[bytes]:
    item = {"key": json.loads(KEY.to_text()), "title": "t", "file": "a.kernel", "sha256": "0" * 64,
            "sources": {WORDS: aot._digest_of(WORDS)}}  # fmt: skip
    return [json.dumps({"format": 1, "toolchain": {"dsl": "1"}, "kernels": [item]}).encode()]


def _read_artifact(_: Path, data: bytes) -> None:
    """Read with the digest of the damaged content, so that only checks of the content apply."""
    content = data[40:]
    Artifact.from_bytes(b"BWKERNEL" + hashlib.sha256(content).digest() + content)


def _read_object(_: Path, data: bytes) -> None:
    """Laid out and linked, but not executed."""
    parsed = HostObject(data)
    parsed.constant("_ptx")
    LoadedObject(parsed, lambda _: 0)


def _read_config(folder: Path, data: bytes) -> None:
    """Damage is a miss."""
    store = Store(folder / "cache", 1 << 30)
    path = store._config_path("ab12")
    if not path.parent.exists():
        store.put_config("ab12", {"kernel": "cd"})
    path.write_bytes(data)
    store.config("ab12")
    store.listed()


# ---- of the emulator


def _kept(folder: Path) -> list[bytes]:
    """The tree of a kernel, without the digest in front of it."""
    from ptxemu.kept import _CODEC

    return [_CODEC.dumps(Module(text.decode()).tree) for text in _ptx(folder)[:2]]


def _read_kept(folder: Path, data: bytes) -> None:
    import zlib

    kept = Kept(folder / "kept", "text", b"sources")
    path = kept._path("tree")
    if not path.parent.exists():
        kept.put("tree", ())
    content = zlib.compress(data, 1)
    path.write_bytes(hashlib.sha256(content).digest() + content)
    kept.get("tree")


def _ptx(_: Path) -> list[bytes]:
    folder = ROOT / "tests"
    paths = sorted(folder.rglob("*.ptx"), key=lambda path: path.stat().st_size)
    return [path.read_bytes() for path in paths[:: max(len(paths) // 16, 1)][:16]]


def _read_ptx(_: Path, data: bytes) -> None:
    """Parsed, and launched with null pointers and for a while."""
    module = Module(data.decode("utf-8", "replace"))
    for name in module.entries[:2]:
        params = [bytes(each.nbytes) for each in module.entry(name).params]
        options = ptxemu.Options(limit=_SECONDS)
        with contextlib.suppress(*_EMULATOR, ValueError):
            module.launch(name, grid=(1,), block=(32,), params=params, memory=[], options=options)


def _maps(_: Path) -> list[bytes]:
    shapes = [((64, 8), (128,), (64, 8)), ((64, 8, 4), (128, 1024), (32, 4, 2))]
    return [tensor_map.encode(4096, *shape, "bf16", "128B") for shape in shapes]


def _read_map(_: Path, data: bytes) -> None:
    found = tensor_map.decode(data)
    assert found.box_bytes <= 256**5 * 16, "a box of at most 256 in each dimension"


def _timelines(folder: Path) -> list[bytes]:
    trace = Trace()
    trace.span(0, "warp 0", "mma", 0, 3, "mma", barrier=1)
    trace.to_perfetto(folder / "trace.json")
    return [(folder / "trace.json").read_bytes()]


# ---- of scripts


def _read_bringup(folder: Path, data: bytes) -> None:
    _written(folder, "bringup-x.json", data)
    where.table(where.documents(folder))


def _bringups(_: Path) -> list[bytes]:
    step = {"group": "g", "words": "w", **asdict(Record("kernels.fmha", "passed")), "figures": None}
    head = {"format": 1, "date": "2026-01-01", "arch": "sm_90a", "gpu": {"name": "NVIDIA H200"},
            "emulated": False, "steps": [step]}  # fmt: skip
    return [json.dumps(head).encode()]


def _read_session(folder: Path, data: bytes) -> None:
    session = Session(folder / "session")
    for ending in ("record", "json"):
        session.place("step", ending).write_bytes(data)
    session.document([], {})
    session.known("step")
    session.figures("step")


def _parameters(_: Path) -> list[bytes]:
    return [(ROOT / "cycle_model" / "parameters" / "h100.json").read_bytes()]


def _path_reader(read: Callable[[Path], Any]) -> Callable[[Path, bytes], Any]:
    return lambda folder, data: read(_written(folder, "file.json", data))


KINDS = {
    kind.name: kind
    for kind in (
        Kind("gguf", _ggufs, _read_gguf, BINARY),
        Kind("packed-experts", _safetensors, _path_reader(checkpoint.load), BINARY),
        Kind("safetensors", _safetensors, _read_checkpoint, BINARY),
        Kind("safetensors-index", _json({"weight_map": {"layer.w13.data": "one.safetensors"}}),
             _read_index, JSON),
        Kind("packed-layout", _layouts, _read_layout, JSON),
        Kind("cache-config", _json(*_CACHES), _path_reader(cache_of), JSON),
        Kind("experts-config", _json(*CONFIGS.values()), _read_experts, JSON),
        Kind("tuned-table", _json({"header": _PLACE.header(), "entries": [asdict(_ENTRY)]}),
             _path_reader(tuned_files.read), JSON),
        Kind("kernel-record", lambda _: [(KEY.to_text() + "\n# a comment\n").encode() * 2],
             _path_reader(aot.read_record), JSON),
        Kind("ahead-manifest", _manifests, _read_manifest, JSON, (aot.AotError,)),
        Kind("kernel-file", lambda _: [_ARTIFACT.to_bytes()], _read_artifact, BINARY,
             (ArtifactError,)),
        Kind("host-object", lambda _: [damage.sample()], _read_object, BINARY, (ObjectError,)),
        Kind("cached-config", _json({"kernel": "cd", "key": json.loads(KEY.to_text())}),
             _read_config, JSON, ()),
        Kind("emulator-cache", _kept, _read_kept, BINARY, ()),
        Kind("ptx", _ptx, _read_ptx, TEXT, _EMULATOR),
        Kind("tensor-map", _maps, _read_map, BINARY, _EMULATOR),
        Kind("timeline", _timelines, _path_reader(Trace.from_perfetto), JSON),
        Kind("bringup", _bringups, _read_bringup, JSON),
        Kind("bringup-session", _json(asdict(Record("step", "passed"))), _read_session, JSON, ()),
        Kind("cycle-parameters", _parameters, _path_reader(cycle_parameters.read), JSON),
    )
}  # fmt: skip
