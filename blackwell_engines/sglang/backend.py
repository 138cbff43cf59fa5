"""The class that SGLang 0.5.23 asks an attention backend for. Only SGLang imports this file.

What does not need SGLang's classes stands in `blackwell_engines.engines` and in `pool.py` beside.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from blackwell_engines.engines.attend import ADVICE, Scores, attend, cache_scales
from blackwell_engines.engines.limits import Layer, why_not
from blackwell_engines.engines.step import Step, make_step
from blackwell_engines.sglang.pool import keys_of, page_table, pages_of
from fmha.launch import ARCHS
from kernelkit.call.launch import choose_target


@dataclass(frozen=True)
class Batch:
    """Metadata of a forward.

    windowed: the step with slots of the window layers, if these have a pool of their own
    written: int64 [tokens], the slots of the new tokens in that pool
    fresh: whether only new tokens are visible, so that no key has to come from the pool
    """

    step: Step
    windowed: Step | None = None
    written: torch.Tensor | None = None
    fresh: bool = False


class BlackwellKernelsBackend(AttentionBackend):
    """Decoder self-attention over a pool of tokens; decoding is captured in graphs."""

    def __init__(self, runner: Any) -> None:
        """Create the backend of a `ModelRunner`.

        Raises:
            NotImplementedError: for a layer or pool that no kernel supports, naming value and
                limit.
        """
        super().__init__()
        self.pool, self.page_size = runner.token_to_kv_pool, runner.page_size
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.device = self.req_to_token.device
        self.pages = -(-self.req_to_token.shape[1] // self.page_size)  # of a request
        self.is_fp8 = runner.kv_cache_dtype == torch.float8_e4m3fn
        self._own = runner.kv_cache_dtype == runner.dtype  # then new keys are those of the pool
        self._scores: dict[int, Scores] = {}
        self._without_scales: set[int] = set()
        self._buffers: dict[str, torch.Tensor] = {}
        self.batch: Batch | None = None
        self._refuse(runner)

    @property
    def mapping(self) -> torch.Tensor | None:
        """int64 [slots], the slots of layers with a window; the allocator registers it with the
        pool, when it is made."""
        return getattr(self.pool, "full_to_swa_index_mapping", None)

    def _refuse(self, runner: Any) -> None:
        translator = getattr(runner, "kv_index_translator", None)
        if getattr(translator, "is_translating", False):
            raise NotImplementedError(
                "a unified pool with slots translated per layer is not supported"
            )
        layer = Layer(
            runner.model_config.head_dim, runner.dtype, runner.kv_cache_dtype, self.page_size
        )
        arch = choose_target(self.device, "auto", None, ARCHS).arch
        self.gathers = bool(why_not(layer, arch))
        reason = why_not(layer, arch, side_by_side=self.gathers)
        if reason:
            raise NotImplementedError(reason)

    # ---- a forward's batch

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Eager: of a decode step, of prompts, or of both at once.

        Raises:
            NotImplementedError: for drafts of tokens, and modes that are none of these.
        """
        mode, lengths = forward_batch.forward_mode, _lengths(forward_batch)
        bound = max(lengths, default=0)
        pages = min(_next_power(-(-bound // self.page_size)), self.pages)
        seq_lens = forward_batch.seq_lens.to(torch.int32)
        requests, written = forward_batch.req_pool_indices, None
        if mode.is_decode_or_idle():
            new = [1] * len(lengths)
            starts = torch.arange(len(new) + 1, dtype=torch.int32, device=seq_lens.device)
        else:
            new = [int(length) for length in forward_batch.extend_seq_lens_cpu]
            starts = _starts(forward_batch.extend_seq_lens)
        tables = [page_table(self.req_to_token, requests, self.page_size, pages)]
        if self.mapping is not None:
            spaces = (requests, self.page_size, pages, self.mapping)
            tables.append(page_table(self.req_to_token, *spaces))
            written = self.mapping[forward_batch.out_cache_loc]
        most = 1 if mode.is_decode_or_idle() else 0
        steps = [
            make_step(new, starts, seq_lens, table, padded=sum(new), bound=bound, most=most)
            for table in tables
        ]
        fresh = self._own and new == lengths and not mode.is_decode_or_idle()
        if self.gathers and not most and not fresh:
            given = (self.req_to_token, requests, seq_lens, lengths)
            maps = (None, self.mapping)[: len(steps)]
            steps = [
                replace(step, gathered=keys_of(*given, mapping))
                for step, mapping in zip(steps, maps, strict=True)
            ]
        self.batch = Batch(steps[0], steps[1] if len(steps) > 1 else None, written, fresh)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Tables that graphs of decode steps read, made once."""
        table, device = (max_bs, self.pages), self.device
        self._buffers = {
            "seq_lens": torch.zeros(max_bs, dtype=torch.int32, device=device),
            "starts": torch.arange(max_bs + 1, dtype=torch.int32, device=device),
            "table": torch.zeros(table, dtype=torch.int32, device=device),
        }
        if self.mapping is not None:
            self._buffers["windowed"] = torch.zeros(table, dtype=torch.int32, device=device)
            self._buffers["written"] = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Views of those tables for a graph's batch; what they hold is filled within the graph.

        Raises:
            NotImplementedError: for graphs of anything but decoding.
        """
        if (
            not forward_batch.forward_mode.is_decode_or_idle()
            or forward_batch.spec_info is not None
        ):
            raise NotImplementedError(f"a graph of {forward_batch.forward_mode}: only decoding")
        count, buffers = forward_batch.batch_size, self._buffers
        given = {"padded": count, "bound": self.pages * self.page_size, "most": 1}
        tables = (buffers["starts"], buffers["seq_lens"])
        step = make_step([1] * count, *tables, buffers["table"], **given)
        if self.mapping is None:
            self.batch = Batch(step)
            return
        windowed = make_step([1] * count, *tables, buffers["windowed"], **given)
        self.batch = Batch(step, windowed, buffers["written"][:count])

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Fill the tables, by operations that a graph repeats."""
        batch, requests = self.batch, forward_batch.req_pool_indices
        assert batch is not None  # `init_forward_metadata_out_graph` comes first
        batch.step.seq_lens.copy_(forward_batch.seq_lens)
        whole = (self.page_size, self.pages)
        batch.step.table.copy_(page_table(self.req_to_token, requests, *whole))
        if batch.windowed and batch.written is not None and self.mapping is not None:
            table = page_table(self.req_to_token, requests, *whole, self.mapping)
            batch.windowed.table.copy_(table)
            batch.written.copy_(self.mapping[forward_batch.out_cache_loc])

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Keys of a row of padding."""
        return 1

    # ---- a layer

    def forward_decode(self, q: torch.Tensor, k: Any, v: Any, *given: Any, **kwargs: Any) -> Any:
        """O [tokens, Hq Dv] of one new token of each request; given: layer, forward_batch."""
        return self._forward(q, (k, v), *given, **kwargs)

    def forward_extend(self, q: torch.Tensor, k: Any, v: Any, *given: Any, **kwargs: Any) -> Any:
        """O [tokens, Hq Dv] of new tokens of all requests; given: layer, forward_batch."""
        return self._forward(q, (k, v), *given, **kwargs)

    def _forward(
        self,
        q: torch.Tensor,
        new: tuple[Any, Any],
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        unknown = [name for name, value in others.items() if value is not None]
        if unknown:
            raise NotImplementedError(f"{unknown[0]}: attention supports q, k, v and sinks")
        batch = self.batch
        assert batch is not None  # the engine describes a forward before it runs layers
        if save_kv_cache and new[0] is not None:
            where = KVWriteLoc.for_batch(forward_batch, swa_loc=batch.written)
            scales = self._scales_of(layer)
            self.pool.set_kv_buffer(layer, where, *new, *(s for s in scales if s is not None))
        step = batch.step
        if batch.windowed is not None and self.pool.layers_mapping[layer.layer_id][1]:
            step = batch.windowed
        heads, kv_heads = layer.tp_q_head_num, layer.tp_k_head_num
        q = q.reshape(-1, heads, layer.qk_head_dim)
        buffers = self.pool.get_kv_buffer(layer.layer_id)
        k_pages, v_pages = (pages_of(buffer, kv_heads, self.page_size) for buffer in buffers)
        fresh = None
        if batch.fresh and new[0] is not None:
            fresh = new
        out = q.new_empty((q.shape[0], heads, layer.v_head_dim))
        attend(step, q, (k_pages, v_pages), out, self._scores_of(layer, sinks), fresh)
        return out.view(q.shape[0], heads * layer.v_head_dim)

    def _scores_of(self, layer: Any, sinks: torch.Tensor | None) -> Scores:
        """Made at a layer's first forward, and refused there."""
        found = self._scores.get(layer.layer_id)
        if found is None:
            _refuse_layer(layer)
            window, heads = layer.sliding_window_size, layer.tp_k_head_num
            scales = self._scales_of(layer)
            k_scale, v_scale = (
                None if scale is None
                else torch.full((heads,), float(scale), dtype=torch.float32, device=self.device)
                for scale in scales
            )  # fmt: skip
            found = self._scores[layer.layer_id] = Scores(
                float(layer.scaling),
                window if window is not None and window > -1 else None,
                layer.logit_cap or None,
                None if sinks is None else sinks.detach().float(),
                k_scale,
                v_scale,
            )
        return found

    def _scales_of(self, layer: Any) -> tuple[float | None, ...]:
        """Return (k_scale, v_scale), or None for both where there are none.

        A layer that lacks one in an FP8 cache is named by a warning: 1.0 is used there.

        Raises:
            ValueError: for scales that are not positive and finite.
        """
        scales = {"k_scale": layer.k_scale_float, "v_scale": layer.v_scale_float}
        if not self.is_fp8:
            return None, None
        missing = [name for name, scale in scales.items() if scale is None]
        if missing and layer.layer_id not in self._without_scales:
            self._without_scales.add(layer.layer_id)
            warnings.warn(
                f"layer {layer.layer_id}: {' and '.join(missing)} not set, 1.0 is used: {ADVICE}",
                stacklevel=2,
            )
        if len(missing) == len(scales):
            return None, None
        given = {name: 1.0 if scale is None else scale for name, scale in scales.items()}
        return cache_scales(layer.layer_id, **given)


def _refuse_layer(layer: Any) -> None:
    """NotImplementedError for a `RadixAttention` that is not plain decoder self-attention."""
    kind = getattr(layer.attn_type, "value", layer.attn_type)
    if layer.is_cross_attention or kind != "decoder":
        kind = "cross-attention" if layer.is_cross_attention else kind
        raise NotImplementedError(f"attention of kind {kind}: only decoder self-attention")
    if layer.xai_temperature_len > 0:
        raise NotImplementedError(
            f"xai_temperature_len {layer.xai_temperature_len}: only -1 (none)"
        )
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise NotImplementedError(
            f"logit_capping_method {layer.logit_capping_method!r}: only 'tanh'"
        )


def _lengths(forward_batch: Any) -> list[int]:
    """Keys of each request, on the host."""
    mode, name = forward_batch.forward_mode, "seq_lens_cpu"
    known = mode.is_decode_or_idle() or mode.is_context_parallel_extend()
    if not known or forward_batch.spec_info is not None:
        raise NotImplementedError(
            f"a batch of {mode}: only decoding, prompts or both, without drafts"
        )
    if getattr(forward_batch, name) is None:
        raise NotImplementedError(f"a batch without {name}: the host has to know the lengths")
    return forward_batch.seq_lens_cpu.tolist()


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    starts = torch.zeros(lengths.shape[0] + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=starts[1:])
    return starts


def _next_power(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
