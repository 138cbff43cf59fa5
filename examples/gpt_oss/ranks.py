"""A model over several ranks: heads and experts are shared out, and what each rank adds to the
residual stream is summed over all of them; or tokens of a prompt are (see `cache.py`).

With `heads` a rank has some of the query and key heads, their rows of the products before and the
columns of the one behind, and their keys in its cache. With `experts` it has some of the experts of
each layer. Everything else, routers among it, is the same on all ranks. The first of them chooses
the tokens, so that no rounding makes them go different ways.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from examples.gpt_oss.config import Config

ONE_SHOT_BYTES = 1 << 18  # of a sum; of more, NCCL's way moves fewer


def reach_each_other(device: torch.device) -> bool:
    """Whether all ranks are on GPUs of this host that can read each other's memory."""
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    if device.type != "cuda" or local != dist.get_world_size():
        return False
    others = [number for number in range(local) if number != device.index]
    return all(torch.cuda.can_device_access_peer(device, other) for other in others)


@dataclass(frozen=True)
class Ranks:
    """This rank of `world`. Raises ValueError for one rank alone, or if nothing is shared.

    Attributes:
        heads: Divide the heads between the ranks.
        experts: Divide the experts.
        context: Divide the tokens of prompts; then nothing else may be divided.
        one_shot: Sum few tokens with one launch instead of NCCL: each rank reads all ranks'
            values through torch's symmetric memory.
    """

    rank: int
    world: int
    heads: bool = True
    experts: bool = True
    context: bool = False
    group: dist.ProcessGroup | None = None
    one_shot: bool = False
    _buffers: dict[torch.dtype, torch.Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.world < 2 or self.context == (self.heads or self.experts):
            raise ValueError(
                f"{self.world} ranks, heads {self.heads}, experts {self.experts}, context "
                f"{self.context}: 2 ranks at least, and either context or some of the others"
            )

    def own(self, what: str, count: int) -> tuple[int, int]:
        """Return (first, end) of this rank's heads or experts; raise ValueError if not
        divisible."""
        if count % self.world:
            raise ValueError(f"{count} {what} over {self.world} ranks: a multiple of them")
        each = count // self.world
        return self.rank * each, (self.rank + 1) * each

    def config(self, whole: Config) -> Config:
        """Return the config with the heads of this rank; all other sizes are unchanged."""
        if not self.heads:
            return whole
        own = {}
        for name in ("num_attention_heads", "num_key_value_heads"):
            first, end = self.own(name, whole.values[name])
            own[name] = end - first
        return Config(whole.name, {**whole.values, **own})

    def expert_range(self, whole: Config) -> tuple[int, int] | None:
        """Return (first, end) of this rank's experts; None for all."""
        return self.own("experts", whole.experts.experts) if self.experts else None

    def whole_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in the model of a tensor whose part on this rank has `shape`."""
        dim = self._divided(name)
        if dim is None:
            return shape
        return tuple(size * (self.world if at == dim else 1) for at, size in enumerate(shape))

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """A rank's rows or columns of a tensor of the model; all of most of them."""
        dim = self._divided(name)
        if dim is not None:
            return whole.chunk(self.world, dim)[self.rank].contiguous()
        # A bias after a sum counts once.
        if self.heads and name.endswith("o_proj.bias") and self.rank:
            return torch.zeros_like(whole)
        return whole

    def shares(self, prefill: bool) -> dict[str, float]:
        """Return this rank's share of all experts and of a step's tokens; see `floors.work_of`."""
        alone = 1 / self.world
        shares = {"experts_share": alone} if self.experts else {}
        return {"tokens_share": alone} if self.context and prefill else shares

    def _divided(self, name: str) -> int | None:
        if not self.heads or "self_attn" not in name:
            return None
        kind = name.split("self_attn.")[1]
        if kind.startswith(("q_proj", "k_proj", "v_proj", "sinks")):
            return 0
        return 1 if kind == "o_proj.weight" else None

    def summed(self, x: torch.Tensor, shared: bool) -> torch.Tensor:
        """Return x summed over all ranks if `shared`; x may be overwritten."""
        if not shared:
            return x
        if self.one_shot and x.nbytes <= ONE_SHOT_BYTES:
            return self._one_shot_sum(x)
        dist.all_reduce(x, group=self.group)
        return x

    def _one_shot_sum(self, x: torch.Tensor) -> torch.Tensor:
        """The first call of all ranks makes the buffer, which no CUDA graph may capture."""
        from torch.distributed import _symmetric_memory as symmetric

        group = dist.group.WORLD if self.group is None else self.group
        assert group is not None
        if x.dtype not in self._buffers:
            count = ONE_SHOT_BYTES // x.itemsize
            self._buffers[x.dtype] = symmetric.empty(count, dtype=x.dtype, device=x.device)
            symmetric.rendezvous(self._buffers[x.dtype], group)
        mine = self._buffers[x.dtype][: x.numel()].view(x.shape)
        add = torch.ops.symm_mem.one_shot_all_reduce_copy
        return add(mine, x.contiguous(), "sum", group.group_name)

    def agreed(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        """x of the rank `source`, in place, on all of them."""
        dist.broadcast(x, group=self.group, group_src=source)
        return x
