"""Stand-ins for the parts of vLLM 0.33.0 that the plugin needs, and a driver that uses the plugin
as the engine does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, EnumMeta
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import torch

from blackwell_engines.engines.step import Step
from tests.blackwell_engines.requests import NOWHERE, LayerShape, Request, packed, stand_ins

# ---- Stand-ins for vLLM 0.33.0, in a few lines: base classes, metadata, the registry

T = TypeVar("T")


class AttentionBackend:
    """The methods that the plugin inherits."""

    forward_includes_kv_cache_update = True

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return dtype in cls.supported_dtypes


class AttentionCGSupport(Enum):
    NEVER = 0
    UNIFORM_BATCH = 2


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class EncoderOnlyAttentionSpec(SimpleNamespace):
    pass


class AttentionImpl(Generic[T]):
    dcp_world_size = 1


class AttentionMetadataBuilder(Generic[T]):
    """The part of vLLM's class that handles drafts of tokens."""

    reorder_batch_threshold = None

    def __init__(self, spec: Any, layer_names: list, vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec, self.layer_names = spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    def _init_reorder_batch_threshold(self, least: int, supports_spec_as_decode: bool) -> None:
        drafts = getattr(self.vllm_config, "drafts", 0) if supports_spec_as_decode else 0
        self.reorder_batch_threshold = max(least, 1 + drafts)


@dataclass
class CommonAttentionMetadata:
    """The fields that the plugin reads."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: Any = True
    seq_lens_cpu_upper_bound: torch.Tensor | None = None


class _Named(EnumMeta):
    def register(cls, name: str, path: str) -> None:
        member = object.__new__(cls)
        member._name_, member._value_ = name, path
        cls._member_map_[name] = member


class AttentionBackendEnum(Enum, metaclass=_Named):
    FLASH_ATTN = "flash"


CAPABILITY = SimpleNamespace(major=9, minor=0)
RANKS = SimpleNamespace(count=1, own=0, group=None)  # those that share keys


def config_of(drafts: int = 0, fast_prefill: bool = False) -> SimpleNamespace:
    """A `VllmConfig`, the parts that the plugin reads."""
    cache = SimpleNamespace(kv_sharing_fast_prefill=fast_prefill)
    return SimpleNamespace(
        drafts=drafts,
        cache_config=cache,
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
    )


def register_backend(name: str, path: str) -> None:
    """Register a backend under a new name."""
    AttentionBackendEnum.register(name, path)


STAND_INS = {
    "vllm.config": {"get_current_vllm_config_or_none": lambda: None},
    "vllm.distributed.parallel_state": {
        "get_dcp_group": lambda: RANKS.group,
        "get_dcp_world_size_and_rank": lambda sharded: (RANKS.count, RANKS.own),
    },
    "vllm.model_executor.layers.quantization": {
        "register_quantization_config": lambda name: lambda config: config
    },
    "vllm.model_executor.layers.quantization.base_config": {"QuantizationConfig": object},
    "vllm.model_executor.layers.quantization.utils.quant_utils": {
        "kFp8StaticTensorSym": "e4m3 with a scale that is known before",
    },
    "vllm.platforms": {
        "current_platform": SimpleNamespace(get_device_capability=lambda: CAPABILITY)
    },
    "vllm.v1.attention.backend": {
        kind.__name__: kind
        for kind in (
            AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadataBuilder,
            AttentionType, CommonAttentionMetadata,
        )
    },
    "vllm.v1.attention.backends.registry": {
        "AttentionBackendEnum": AttentionBackendEnum, "register_backend": register_backend,
    },
    "vllm.v1.attention.ops.dcp": {
        "cp_lse_ag_out_rs": lambda o, lse, group, return_lse: group.combine(o, lse),
    },
    "vllm.v1.kv_cache_interface": {"EncoderOnlyAttentionSpec": EncoderOnlyAttentionSpec},
}  # fmt: skip


def modules() -> dict[str, ModuleType]:
    """Map the names under which the plugin imports modules to stand-ins."""
    return stand_ins(STAND_INS)


# ---- A driver that does what vLLM does with an attention backend, step by step, for one layer
#
# Blocks are taken from a pool in random order and given back. The tokens of a step are
# concatenated, those of requests with few new tokens first. Tables and slots are made as vLLM makes
# them; the cache is written by `do_kv_cache_update` and read by `forward`. Memory that was never
# written is NaN.

WIDTH = 6  # columns of a block table
STRIDES = {  # of [B, H, N, C], by layout in memory
    "LBHNC": (0, 1, 2, 3),
    "LBNHC": (0, 2, 1, 3),
    "LHBNC": (1, 0, 2, 3),
}


def cache_of(
    shape: LayerShape, blocks: int, block_size: int, layout: str, padding: int = 0
) -> torch.Tensor:
    """[blocks, kv_heads, block_size, 2 head_dim] with this layout in memory, filled with NaN.
    padding: elements between blocks, for a layout that has blocks outside."""
    sizes = (blocks, shape.kv_heads, block_size, 2 * shape.head_dim)
    order = STRIDES[layout]
    if shape.kv_dtype is not None:
        memory = torch.full([sizes[d] for d in order], 0x7F, dtype=torch.uint8)
    else:
        memory = torch.full([sizes[d] for d in order], math.nan, dtype=shape.dtype)
    if padding:
        blocks = memory.flatten(1)
        wide = torch.cat((blocks, blocks.new_zeros(len(blocks), padding)), 1)
        memory = wide[:, : blocks.shape[1]].unflatten(1, memory.shape[1:])
    return memory.permute([order.index(d) for d in range(4)])


class Engine:
    """Driver with one layer of `shape`.

    drafts: draft tokens that a decoding request may have.
    padding: elements between blocks.
    builder: what vLLM derives from the plugin's builder, as `wrappers` has it.
    """

    def __init__(
        self,
        plugin: ModuleType,
        shape: LayerShape,
        *,
        blocks: int = 24,
        block_size: int = 16,
        layout: str = "LBNHC",
        drafts: int = 0,
        device: str = "cpu",
        padding: int = 0,
        builder: Callable[[type], type] = lambda builder: builder,
    ) -> None:
        self.shape, self.block_size, self.device = shape, block_size, device
        backend = plugin.BlackwellKernelsBackend
        dtype = "fp8" if shape.kv_dtype is not None else "auto"
        self.cache = cache_of(shape, blocks, block_size, layout, padding).to(device)
        self.free = random.Random(blocks).sample(range(blocks), blocks)
        self.builder = builder(backend.get_builder_cls())(
            SimpleNamespace(block_size=block_size, dcp_sharded=True),
            ["layer"],
            config_of(drafts),
            None,
        )
        window = None if shape.window is None else shape.window + 1
        self.impl = backend.get_impl_cls()(
            shape.q_heads, shape.head_dim, shape.head_dim**-0.5, shape.kv_heads, None, window,
            dtype, shape.softcap, "decoder", None,
            **({"sinks": shape.sink_logits.to(device)} if shape.sinks else {}),
        )  # fmt: skip
        k_scale, v_scale = shape.scales
        self.layer = SimpleNamespace(
            _k_scale=torch.tensor(k_scale, device=device),
            _v_scale=torch.tensor(v_scale, device=device),
            _k_scale_float=torch.tensor(k_scale).max().item(),
            _v_scale_float=torch.tensor(v_scale).max().item(),
        )  # fmt: skip
        self.requests: dict[int, Request] = {}

    def admit(self, name: int, length: int) -> None:
        """Admit a request that will have `length` tokens."""
        self.requests[name] = Request(name, self.shape, length)

    def preempt(self, name: int) -> None:
        """Give the request's blocks back to the pool; it will start again."""
        request = self.requests[name]
        self.free += request.pages
        request.pages, request.done = [], 0

    def metadata(
        self, plan: dict[int, int], padded_requests: int = 0
    ) -> tuple[CommonAttentionMetadata, list[Request]]:
        """Build the metadata of a step.

        plan: number of new tokens by request.
        padded_requests: number of requests of a captured graph.
        """
        size, order = self.block_size, [self.requests[name] for name in plan]
        count = max(len(plan), padded_requests)
        table = torch.full((count, WIDTH), NOWHERE, dtype=torch.int32)
        lengths, ends, slots = [*plan.values()], torch.zeros(count, dtype=torch.int32), []
        for row, (request, new) in enumerate(zip(order, lengths, strict=True)):
            ends[row] = request.done + new
            while len(request.pages) * size < request.done + new:
                request.pages.append(self.free.pop())
            table[row, : len(request.pages)] = torch.tensor(request.pages)
            for token in range(request.done, request.done + new):
                slots.append(request.pages[token // size] * size + token % size)
        tokens = padded_requests * lengths[0] if padded_requests else len(slots)
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        starts = torch.cat((starts, starts[-1:].expand(count - len(lengths))))
        slots += [-1] * (tokens - len(slots))
        return CommonAttentionMetadata(
            query_start_loc=starts.clone().to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=ends.to(self.device),
            num_reqs=count,
            num_actual_tokens=tokens,
            max_query_len=max(lengths),
            max_seq_len=int(ends.max()),
            block_table_tensor=table.to(self.device),
            slot_mapping=torch.tensor(slots, device=self.device),
            seq_lens_cpu_upper_bound=ends,
        ), order

    def step(
        self,
        plan: dict[int, int],
        padded_requests: int = 0,
        beside: int = 3,
        causal: bool = True,
    ) -> Step:
        """Run a step, and judge every new token. beside: rows of the model's tensors that belong to
        no token.
        """
        common, order = self.metadata(plan, padded_requests)
        common.causal = causal
        rows = common.num_actual_tokens + beside
        new = [slice(r.done, r.done + n) for r, n in zip(order, plan.values(), strict=True)]
        q, k, v = (
            packed([getattr(r, x)[part] for r, part in zip(order, new, strict=True)], rows)
            for x in "qkv"
        )
        q, k, v = (x.to(self.device) for x in (q, k, v))
        self.impl.do_kv_cache_update(self.layer, k, v, self.cache, common.slot_mapping)
        step = self.builder.build(0, common)
        out = q.new_full((rows, self.shape.q_heads, self.shape.head_dim), 777.0)
        given = self.impl.forward(self.layer, q, k, v, self.cache, step, out)
        assert given is out
        assert (out[common.num_actual_tokens :] == 777.0).all(), "rows of nobody were written"
        first = 0
        for request, part in zip(order, new, strict=True):
            size = part.stop - part.start
            request.judge(out[first : first + size].cpu(), part.start, causal=causal)
            request.done, first = part.stop, first + size
        return step
