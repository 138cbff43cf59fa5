"""The classes that vLLM 0.33.0 asks an attention backend for. Only vLLM imports this file.

What does not need vLLM's classes stands in `blackwell_engines.engines` and in `cache.py` beside.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.parallel_state import get_dcp_group, get_dcp_world_size_and_rank
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.ops import dcp
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec

from blackwell_engines.engines.attend import Scores, attend, cache_scales
from blackwell_engines.engines.limits import Layer, arch_of, why_not
from blackwell_engines.engines.step import Step, make_step
from blackwell_engines.vllm import NAME
from blackwell_engines.vllm.cache import (
    BLOCK_SIZES,
    CACHE_DTYPES,
    pages_of,
    unknown_dtype,
    write,
)
from blackwell_engines.vllm.context import Place, SharedStep, attend_shared, share
from gqa_lowlatency.config import MAX_Q_TOKENS
from kernelkit.plan.limits import MAX_POSITION

NO_ALIBI = (
    "ALiBi: no kernel adds a bias to scores. Choose another backend for this model, TRITON_ATTN or "
    "FLASH_ATTN"
)
ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)  # layers without a cache


class BlackwellKernelsBackend(AttentionBackend):
    """Attention over paged keys, and of encoders, which have no cache."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [*CACHE_DTYPES]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """Return the name for `--attention-backend`."""
        return NAME

    @staticmethod
    def get_impl_cls() -> type[BlackwellKernelsImpl]:
        """Return the class of a layer's attention."""
        return BlackwellKernelsImpl

    @staticmethod
    def get_builder_cls() -> type[BlackwellKernelsBuilder]:
        """Return the class that builds a step's metadata."""
        return BlackwellKernelsBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """Rows of a page; the engine cuts its blocks into such."""
        return [*BLOCK_SIZES]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether the head size is in range; `supports_combination` also checks the
        architecture."""
        return head_size % 16 == 0 and 16 <= head_size <= 512

    @classmethod
    def supports_sink(cls) -> bool:
        """Learned sinks."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """FP8 caches with a scale for each KV head."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Keys before the own position."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Steps whose tokens see all keys of their request."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders, encoders, and decoders over the keys of an encoder."""
        return attn_type in (*ENCODERS, AttentionType.DECODER, AttentionType.ENCODER_DECODER)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """A batch is divided by the lengths that the host knows."""
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Why no kernel takes such a layer, by the kernels' own checks."""
        config = get_current_vllm_config_or_none()
        model = None if config is None else config.model_config
        if model is not None and model.uses_alibi:
            return NO_ALIBI
        if (kv_cache_dtype or "auto") not in CACHE_DTYPES:
            return unknown_dtype(kv_cache_dtype)
        try:
            arch = arch_of((device_capability.major, device_capability.minor))
        except NotImplementedError as error:
            return str(error)
        kv_dtype = CACHE_DTYPES.get(kv_cache_dtype or "auto") or dtype
        layer = Layer(head_size, dtype, kv_dtype, BLOCK_SIZES[0], sinks=has_sink)
        return why_not(layer, arch) or None


class BlackwellKernelsBuilder(AttentionMetadataBuilder[Step]):
    """A `Step` for each step of the engine; of its tensors none is copied for what is decoded, so
    that a captured graph reads what the engine writes to them."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        # One that is wider than a decode takes is a prompt's piece.
        self.reorder_batch_threshold: int = min(self.reorder_batch_threshold or 1, MAX_Q_TOKENS)
        self._copied: bool = vllm_config.cache_config.kv_sharing_fast_prefill
        self._place: Place | None = None
        self._most = self.reorder_batch_threshold
        if isinstance(kv_cache_spec, EncoderOnlyAttentionSpec):
            self._most = 0
            return
        ranks, rank = get_dcp_world_size_and_rank(kv_cache_spec.dcp_sharded)
        if ranks > 1:
            self._share(rank, ranks)

    def _share(self, rank: int, ranks: int) -> None:
        """Ranks share the keys of a request."""
        chunk = getattr(self.kv_cache_spec, "attention_chunk_size", None)
        if chunk is not None:
            raise NotImplementedError(
                f"attention_chunk_size {chunk} with decode_context_parallel_size {ranks}: a rank "
                "has every so many keys of a chunk"
            )
        config = self.vllm_config
        self._place = Place(rank, ranks, config.parallel_config.cp_kv_cache_interleave_size)
        count = config.scheduler_config.max_num_seqs
        self._keys = torch.zeros(count, dtype=torch.int32, device=self.device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Batches that only decode; an encoder never does."""
        encodes = isinstance(kv_cache_spec, EncoderOnlyAttentionSpec)
        return AttentionCGSupport.NEVER if encodes else cls._cudagraph_support

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Step:
        """The batch of a step.

        Raises:
            NotImplementedError: where each request has a `causal` of its own.
        """
        given = common_attn_metadata
        if not isinstance(given.causal, bool):
            raise NotImplementedError(
                "causal is a tensor: the host, which chooses kernels by it, would wait for the GPU"
            )
        lengths = self._lengths(given)
        step = make_step(
            lengths,
            given.query_start_loc,
            given.seq_lens,
            given.block_table_tensor,
            padded=given.num_actual_tokens,
            bound=given.max_seq_len,
            most=self._most,
            causal=given.causal,
        )
        if self._place is None:
            return step
        keys = given.seq_lens_cpu_upper_bound
        alone = keys is not None and keys[: given.num_reqs].tolist() == lengths
        return share(step, self._place, self._keys, alone=alone)

    def _lengths(self, given: CommonAttentionMetadata) -> list[int]:
        """New tokens of each request. vLLM's fast prefill of layers that share keys copies the
        starts from the GPU without waiting: they are read here only if no other number says it."""
        if given.max_query_len == 1 and given.num_actual_tokens >= given.num_reqs:
            return [1] * given.num_reqs
        if self._copied and given.query_start_loc.is_cuda:
            torch.cuda.current_stream(given.query_start_loc.device).synchronize()
        starts = given.query_start_loc_cpu[: given.num_reqs + 1].tolist()
        return [end - begin for begin, end in pairwise(starts)]

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Step:
        """The batch of a step that is captured: its launches are laid out for the longest request
        that tables have room for, whatever the lengths are now."""
        step = self.build(0, common_attn_metadata)
        step.bound = MAX_POSITION
        return step


class BlackwellKernelsImpl(AttentionImpl[Step]):
    """Attention of one layer."""

    can_return_lse_for_decode = True  # in natural log
    supports_dcp = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Accept the arguments that vLLM passes.

        Raises:
            NotImplementedError: for ALiBi, a dtype of the cache without kernels, and a window over
                keys of an encoder or keys that ranks share.
            ValueError: if sinks are not one for each query head.
        """
        if alibi_slopes is not None:
            raise NotImplementedError(NO_ALIBI)
        if kv_cache_dtype not in CACHE_DTYPES:
            raise NotImplementedError(unknown_dtype(kv_cache_dtype))
        crosses, ranks = attn_type == AttentionType.ENCODER_DECODER, self.dcp_world_size
        if crosses and sliding_window is not None:
            raise NotImplementedError(
                f"sliding_window {sliding_window} over keys of an encoder, which are at no distance"
            )
        if ranks > 1 and (crosses or sliding_window is not None):
            raise NotImplementedError(
                f"attn_type {attn_type}, sliding_window {sliding_window} with "
                f"decode_context_parallel_size {ranks}: only keys of decoders without a window are "
                "shared by ranks"
            )
        if sinks is not None and tuple(sinks.shape) != (num_heads,):
            raise ValueError(
                f"sinks {tuple(sinks.shape)}, expected one for each of {num_heads} heads"
            )
        config = get_current_vllm_config_or_none()
        self._exchanges = config is not None and config.parallel_config.dcp_comm_backend == "a2a"
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._window = None if sliding_window is None else sliding_window - 1
        self._softcap = logits_soft_cap
        self._scores: dict[tuple[float, ...], Scores] = {}

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Sinks have their values now."""
        self._scores.clear()

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """New tokens [T or more, kv_heads, head_size] to where `slot_mapping` int64 [T] says; an
        encoder has no cache."""
        if kv_cache.numel() and self.attn_type not in ENCODERS:
            if CACHE_DTYPES[self.kv_cache_dtype] == torch.float8_e4m3fn:
                _scales_of(layer)
            pages = pages_of(kv_cache, self.head_size, self.kv_cache_dtype)
            write(pages, key, value, slot_mapping, layer._k_scale, layer._v_scale)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Step | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """O of new tokens, which the cache has already, into `output` [tokens, heads, head_size];
        in an encoder `key` and `value` are all that they see.

        Raises:
            NotImplementedError: for an output with scales of blocks, and what kernels refuse.
            ValueError: for an FP8 cache of a layer whose scales were not loaded.
        """
        if output_block_scale is not None:
            raise NotImplementedError("output_block_scale: O in e4m3 has one scale")
        if attn_metadata is None:  # a run that measures memory
            return output.zero_()
        encodes = self.attn_type in ENCODERS
        pages = new = (key, value)
        if not encodes:
            pages = pages_of(kv_cache, self.head_size, self.kv_cache_dtype)
        scores = self._scores_of(layer, pages[0])
        if output_scale is not None:
            scores = replace(scores, out_scale=output_scale)
        if isinstance(attn_metadata, SharedStep):
            given = (attn_metadata, query, new, pages, output, scores)
            attend_shared(*given, self._gather, self._combine)
        else:
            attend(attn_metadata, query, pages, output, scores, fresh=new if encodes else None)
        return output

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Whether O may be e4m3 with one scale that is known before: not where it is made of the
        parts of several ranks, nor where the GPU does not convert to e4m3."""
        capability = current_platform.get_device_capability()
        if quant_key != kFp8StaticTensorSym or self.dcp_world_size > 1 or capability is None:
            return False
        arch = arch_of((capability.major, capability.minor))
        return not why_not(
            Layer(
                self.head_size, torch.bfloat16, torch.bfloat16, BLOCK_SIZES[0],
                out_dtype=torch.float8_e4m3fn,
            ),
            arch,
        )  # fmt: skip

    def _gather(self, q: torch.Tensor) -> torch.Tensor:
        """Query heads of all ranks that share keys."""
        return get_dcp_group().all_gather(q, dim=1)

    def _combine(self, o: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """O and LSE of this rank's heads over the keys of all."""
        combine = dcp.dcp_a2a_lse_reduce if self._exchanges else dcp.cp_lse_ag_out_rs
        return combine(o, lse, get_dcp_group(), return_lse=True)

    def _scores_of(self, layer: Any, k_pages: torch.Tensor) -> Scores:
        """Made once: scales by KV head and sinks in fp32 are what kernels read in place."""
        is_fp8 = k_pages.dtype == torch.float8_e4m3fn
        numbers = _scales_of(layer) if is_fp8 else (1.0, 1.0)
        if numbers not in self._scores:
            scales: dict[str, torch.Tensor] = {}
            if is_fp8:
                scales = {
                    name: self._by_head(layer, name, number)
                    for name, number in zip(("k_scale", "v_scale"), numbers, strict=True)
                }
            sinks = None if self.sinks is None else self.sinks.detach().float()
            self._scores[numbers] = Scores(self.scale, self._window, self._softcap, sinks, **scales)
        return self._scores[numbers]

    def _by_head(self, layer: Any, name: str, number: float) -> torch.Tensor:
        """Return a scale per KV head in fp32: the layer's own, or `number` for each of them."""
        given = getattr(layer, f"_{name}")
        if given.numel() > 1:
            for scale in given.tolist():  # `number` is the largest of them
                cache_scales(_name_of(layer), **{name: scale})
            return given
        return torch.full((self.num_kv_heads,), number, dtype=torch.float32, device=given.device)


def _scales_of(layer: Any) -> tuple[float, ...]:
    """Return (k_scale, v_scale) of an FP8 cache; ValueError for a layer that has none."""
    numbers = {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float}
    return cache_scales(_name_of(layer), **numbers)


def _name_of(layer: Any) -> str:
    return getattr(layer, "layer_name", type(layer).__name__)
