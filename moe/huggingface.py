"""Pack experts from checkpoints of Hugging Face's hub: no value changes.

`pack_gpt_oss` reads the MXFP4 of openai/gpt-oss-*, all experts of a layer in one tensor.
`pack_experts` reads experts with separate tensors; `SCHEMES` has their names: NVFP4 of ModelOpt and
of compressed-tensors, MXFP4 of compressed-tensors and of DeepSeek-V4. Both read one expert at a
time: memory holds the packed layer and one more expert. They can read only the experts of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from kernelkit.call.tensors import device_of, require_type
from kernelkit.compile.outside import FileError, NoFile, json_file, require_fields
from moe.arguments import Scales, check_expert_range, range_fields
from moe.checkpoint import LAYOUT, of_layout, open_file, read_layout, state_dict
from moe.config import DEFAULT_GRANULARITY
from moe.packing import CheckpointWeight, PackedExperts, pack_quantised

INDEX = "model.safetensors.index.json"
BYTES = (torch.int8, torch.float4_e2m1fn_x2)  # bytes of two elements, like uint8
PAIRS = ("w13.encode_scale", "w13.decode_scale")  # [1] of an expert, or [1, 2] of gate and up
_MOST_NAME = 255  # bytes of a file name
PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))  # gate, up, down


@dataclass(frozen=True)
class Scheme:
    """Suffixes of the tensor names of a quantised matrix."""

    fmt: str
    data: str
    scales: str
    encode: str = ""  # global scale that values were multiplied by
    decode: str = ""  # global scale that values are multiplied by
    activations: str = ""  # global scale of its activations, likewise

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors that a matrix has."""
        return tuple(name for name in (self.data, self.scales, self.encode, self.decode) if name)


SCHEMES = (  # the first one of which a matrix has all tensors
    Scheme("nvfp4", "weight", "weight_scale", decode="weight_scale_2", activations="input_scale"),
    Scheme("nvfp4", "weight_packed", "weight_scale", encode="weight_global_scale",
           activations="input_global_scale"),
    Scheme("mxfp4", "weight_packed", "weight_scale"),
    Scheme("mxfp4", "weight", "scale"),
)  # fmt: skip


class Checkpoint:
    """Tensors of one safetensors file, or of a folder of them, by name; each is read on request."""

    def __init__(self, path: str | PathLike[str]) -> None:
        if not isinstance(path, str | PathLike):
            raise TypeError(f"path is {type(path).__name__}, expected str or os.PathLike")
        self.path = Path(path)
        self._stack = ExitStack()
        self._files: dict[Path, Any] = {}
        folder = self.path if self.path.is_dir() else self.path.parent
        if (index := folder / INDEX).is_file() and self.path.is_dir():
            names = _weight_map(index)
            self._places = {name: folder / file for name, file in names.items()}
            return
        files = sorted(folder.glob("*.safetensors")) if self.path.is_dir() else [self.path]
        if not files:
            raise NoFile(f"{self.path} has no safetensors files")
        self._places = {name: file for file in files for name in [*self._file(file).keys()]}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, which is not read."""
        return tuple(self._slices(name).get_shape())

    def tensor(self, name: str) -> torch.Tensor:
        """Read a whole tensor."""
        self._slices(name)
        return self._file(self._places[name]).get_tensor(name)

    def one(self, name: str, place: int) -> torch.Tensor:
        """Read index `place` of the first dimension only: [1, ...]."""
        return self._slices(name)[place : place + 1]

    def model_type(self) -> str | None:
        """Return the model_type of the folder's config.json, None without one."""
        config = (self.path if self.path.is_dir() else self.path.parent) / "config.json"
        if not config.is_file():
            return None
        found = json_file(config).get("model_type")
        return found if isinstance(found, str) else None

    def _slices(self, name: str) -> Any:
        if name not in self._places:
            raise ValueError(f"no tensor {name!r} in {self.path}")
        return self._file(self._places[name]).get_slice(name)

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            if not path.is_file():
                raise NoFile(f"{path}: no such file")
            self._files[path] = self._stack.enter_context(open_file(path))
        return self._files[path]


def _weight_map(index: Path) -> dict[str, str]:
    """Map the name of each tensor to the name of its file, in the same folder."""
    content = json_file(index)
    require_fields(str(index), content, {"weight_map": dict})
    for name, file in content["weight_map"].items():
        if not isinstance(file, str) or not _is_name(file):
            raise FileError(f"{index}: {name!r:.80} is in {file!r:.80}, expected a name of a file")
    return content["weight_map"]


def _is_name(file: str) -> bool:
    """Whether this is the name of a file in the same folder."""
    short = len(file.encode("utf-8", "replace")) <= _MOST_NAME
    return short and Path(file).name == file and bool(file.strip(".")) and "\0" not in file


def pack_gpt_oss(
    path: str | PathLike[str],
    prefix: str,
    *,
    expert_range: tuple[int, int] | None = None,
    granularity: int = DEFAULT_GRANULARITY,
    device: str | torch.device = "cpu",
    progress: bool = False,
) -> PackedExperts:
    """Pack the experts of a layer of gpt-oss, in mxfp4, with their biases.

    Args:
        path: a safetensors file, or the folder of a checkpoint.
        prefix: prefix of the tensors, such as 'model.layers.3.mlp.experts': gate_up_proj_blocks [E,
            2I, H / 32, 16] and _scales [E, 2I, H / 32] in uint8, _bias [E, 2I] in bf16, with
            alternating rows of gate and up; down_proj_blocks, _scales and _bias [E, H, ...].
        expert_range: (first, end): only these are read; all by default.
        granularity: of the packed rows, as of `moe.pack`.
        device: device of the packed experts.
        progress: draw a bar, by rich.

    Raises:
        TypeError, ValueError: naming the tensor that is missing, or the value and the limit.
    """
    require_type("prefix", prefix, str)
    require_type("progress", progress, bool)
    with Checkpoint(path) as checkpoint:
        count = checkpoint.shape(f"{prefix}.gate_up_proj_blocks")[0]
        first, end = range_fields(expert_range).values() if expert_range else (0, count)
        check_expert_range(first, end, count)

        def packed(expert: int) -> PackedExperts:
            (w13, bias13), (w2, bias2) = (
                _of_gpt_oss(checkpoint, f"{prefix}.{name}", expert)
                for name in ("gate_up_proj", "down_proj")
            )
            biases, order = (bias13, bias2), "alternating"
            return pack_quantised(
                w13, w2, "mxfp4", granularity=granularity, order=order, biases=biases
            )

        named = [(f"expert {expert} of {prefix}", expert) for expert in range(first, end)]
        return replace(_one_by_one(named, packed, device, progress), model_type="gpt_oss")


def pack_experts(
    path: str | PathLike[str],
    experts: Sequence[str],
    *,
    granularity: int = DEFAULT_GRANULARITY,
    device: str | torch.device = "cpu",
    progress: bool = False,
) -> PackedExperts:
    """Pack experts with separate tensors, in the format that they are stored in.

    Args:
        path, granularity, device, progress: as of `pack_gpt_oss`.
        experts: name prefixes of gate_proj, up_proj and down_proj, or of w1, w3 and w2, in the
            order of the packed experts: [f'model.layers.3.mlp.experts.{e}' for e in range(E)], or
            those of a rank; 'model.layers.3.mlp.shared_experts' may follow.

    Raises:
        TypeError, ValueError: naming the tensor that is missing, or the value and the limit.
    """
    require_type("progress", progress, bool)
    with Checkpoint(path) as checkpoint:
        scheme, names = _scheme_of(checkpoint, experts)

        def packed(expert: str) -> PackedExperts:
            gate, up, down = (_matrix(checkpoint, f"{expert}.{name}", scheme) for name in names)
            w13 = _beside(gate, up)
            return pack_quantised(w13, down, scheme.fmt, granularity=granularity)

        whole = _one_by_one([(name, name) for name in experts], packed, device, progress)
        return replace(whole, model_type=checkpoint.model_type())


def activation_scales(path: str | PathLike[str], experts: Sequence[str]) -> Scales:
    """Return the calibrated global scales of the activations of these experts in nvfp4, which are
    named as in `pack_experts`: the smallest encode scale of all, with which no expert saturates."""
    with Checkpoint(path) as checkpoint:
        scheme, names = _scheme_of(checkpoint, experts)
        if not scheme.activations:
            raise ValueError(f"{experts[0]} is in {scheme.fmt}, whose activations have no scale")

        def smallest(projections: Iterable[str]) -> torch.Tensor:
            found = [
                checkpoint.tensor(f"{expert}.{name}.{scheme.activations}").float().reshape(1)
                for expert in experts
                for name in projections
            ]
            scales = torch.cat(found)
            return (scales.reciprocal() if scheme.decode else scales).amin().reshape(1)

        return Scales(smallest(names[:2]), smallest(names[2:]))


def _of_gpt_oss(
    checkpoint: Checkpoint, name: str, expert: int
) -> tuple[CheckpointWeight, torch.Tensor]:
    """A matrix of one expert, and its bias."""
    blocks, scales, bias = (
        checkpoint.one(f"{name}_{field}", expert) for field in ("blocks", "scales", "bias")
    )
    if blocks.ndim != 4:
        raise ValueError(f"{name}_blocks has shape {tuple(blocks.shape)}, expected 4 dimensions")
    return CheckpointWeight(blocks.flatten(2), scales), bias


def _scheme_of(checkpoint: Checkpoint, experts: Sequence[str]) -> tuple[Scheme, tuple[str, ...]]:
    """Return the scheme and the names of the experts' matrices. The first expert decides."""
    if isinstance(experts, str) or not isinstance(experts, Sequence) or not experts:
        raise TypeError(f"experts is {experts!r:.80}, expected a sequence of names, at least one")
    for place, name in enumerate(experts):
        require_type(f"experts[{place}]", name, str)
    expert = experts[0]
    for names in PROJECTIONS:
        for scheme in SCHEMES:
            if all(f"{expert}.{names[0]}.{name}" in checkpoint for name in scheme.names):
                return scheme, names
    kinds = " or ".join(", ".join(scheme.names) for scheme in SCHEMES)
    gates = " or ".join(names[0] for names in PROJECTIONS)
    raise ValueError(f"{expert}.{gates} in {checkpoint.path}: expected the tensors {kinds}")


def _matrix(checkpoint: Checkpoint, name: str, scheme: Scheme) -> CheckpointWeight:
    """Read a matrix of one expert, [1, ...]."""

    def scale(field: str) -> torch.Tensor | None:
        return checkpoint.tensor(f"{name}.{field}").reshape(1) if field else None

    data, scales = (checkpoint.tensor(f"{name}.{each}") for each in (scheme.data, scheme.scales))
    if data.dtype in BYTES:  # torch does not concatenate float4
        data = data.view(torch.uint8)
    encode, decode = scale(scheme.encode), scale(scheme.decode)
    return CheckpointWeight(data[None], scales[None], encode, decode)


def _beside(gate: CheckpointWeight, up: CheckpointWeight) -> CheckpointWeight:
    """Build w13: the rows of gate, then those of up, with the global scales of both."""
    data, scales = torch.cat((gate.data, up.data), 1), torch.cat((gate.scales, up.scales), 1)
    encode, decode = (
        None if first is None or second is None else torch.stack((first, second), 1)
        for first, second in (
            (gate.encode_scale, up.encode_scale),
            (gate.decode_scale, up.decode_scale),
        )
    )
    return CheckpointWeight(data, scales, encode, decode)


def _one_by_one(
    experts: Sequence[tuple[str, Any]],
    packed: Callable[[Any], PackedExperts],
    device: str | torch.device,
    progress: bool,
) -> PackedExperts:
    """Pack each expert separately, and join them. experts: names, and arguments of `packed`."""
    layout, whole, where = {}, {}, device_of(device)
    for place, (name, expert) in enumerate(tracked(experts, progress)):
        try:
            tensors = state_dict(packed(expert))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        stored = tensors.pop(LAYOUT)
        if not place:
            layout = read_layout(LAYOUT, stored)
            whole = {
                field: each.new_empty((len(experts), *each.shape), device=where)
                for field, each in tensors.items()
            }
        for field, each in tensors.items():
            wanted = tuple(whole[field].shape[1:])
            if field in PAIRS and each.ndim > len(wanted):  # the first one that has two
                whole[field] = whole[field][..., None].repeat(1, 1, 2)
            elif each.shape != wanted and field not in PAIRS:
                given = f"{field} has shape {tuple(each.shape)}"
                raise ValueError(f"{name}: {given}, other experts have {wanted}")
            whole[field][place].copy_(each)
    return of_layout(layout, {field: each.flatten(0, 1) for field, each in whole.items()})


def tracked(experts: Sequence[tuple[str, Any]], progress: bool) -> Iterable[tuple[str, Any]]:
    """Iterate over the experts, with a progress bar if `progress` is True."""
    if not progress:
        return experts
    try:
        from rich.progress import track
    except ImportError as error:
        raise ImportError("progress needs rich: pip install rich") from error
    return track(experts, description="packing experts")
