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

from blackwell_engines.engines.attend import ADVICE, Scores, attend, cache_scales, decodes
from blackwell_engines.engines.limits import Layer, why_not
from blackwell_engines.engines.step import Step, make_step
from blackwell_engines.sglang.pool import keys_of, page_table, pages_of
from blackwell_engines.sglang.tokens import (
    Tokens,
    graph_tokens,
    pieces_of,
    tokens_of,
    tree_of,
    tree_rows,
)
from fmha.launch import ARCHS
from gqa_lowlatency.config import MAX_Q_TOKENS
from kernelkit.call.launch import choose_target


@dataclass
class Batch:
    """Metadata of a forward.

    step: of layers with all keys
    windowed: the same with slots of the window layers, if these have a pool of their own
    local: of layers that see their chunk of positions alone
    cross: of layers that see an encoder's keys alone
    written: int64 [tokens], the slots of the new tokens in the pool of the window layers
    whole: whether only new tokens are visible
    tokens: the numbers of an eager forward
    """

    step: Step
    windowed: Step | None = None
    local: Step | None = None
    cross: Step | None = None
    written: torch.Tensor | None = None
    whole: bool = False
    tokens: Tokens | None = None


class BlackwellKernelsBackend(AttentionBackend):
    """Decoder self-attention over a pool of tokens; decoding is captured in graphs."""

    def __init__(self, runner: Any, ahead: int = 0) -> None:
        """Create the backend of a `ModelRunner`.

        Args:
            ahead: for a step of a draft model: how many drafts decode without being counted.

        Raises:
            NotImplementedError: for a layer or pool that no kernel supports, naming value and
                limit.
        """
        super().__init__()
        # SGLang's models read both pools from the backend, by these names.
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.page_size = runner.page_size
        self.req_to_token = self.req_to_token_pool.req_to_token
        self.device = self.req_to_token.device
        self.pages = -(-self.req_to_token.shape[1] // self.page_size)  # of a request
        self.is_fp8 = runner.kv_cache_dtype == torch.float8_e4m3fn
        self.head_dim = runner.model_config.head_dim
        self.chunk = runner.attention_chunk_size  # of positions, for layers with use_irope
        self._own = runner.kv_cache_dtype == runner.dtype  # then new keys are those of the pool
        self._scores: dict[Any, Scores] = {}
        self._without_scales: set[int] = set()
        self._buffers: dict[str, torch.Tensor] = {}
        self.batch: Batch | None = None
        self.ahead = ahead
        self._refuse(runner)

    @property
    def mapping(self) -> torch.Tensor | None:
        """int64 [slots], the slots of layers with a window; the allocator registers it with the
        pool, when it is made."""
        return getattr(self.token_to_kv_pool, "full_to_swa_index_mapping", None)

    def _refuse(self, runner: Any) -> None:
        translator = getattr(runner, "kv_index_translator", None)
        if getattr(translator, "is_translating", False):
            raise NotImplementedError(
                "a unified pool with slots translated per layer is not supported"
            )
        layer = Layer(self.head_dim, runner.dtype, runner.kv_cache_dtype, self.page_size)
        arch = choose_target(self.device, "auto", None, ARCHS).arch
        self.gathers = bool(why_not(layer, arch))
        reason = why_not(layer, arch, side_by_side=self.gathers)
        if reason:
            raise NotImplementedError(reason)

    # ---- a forward's batch

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Eager: of a decode step, of prompts, of both at once, or of drafts.

        Raises:
            NotImplementedError: for modes that are none of these, and drafts that cannot be told
                from the batch.
        """
        tokens = tokens_of(forward_batch, self.page_size, self.ahead)
        if self.ahead and self.mapping is not None:
            raise NotImplementedError("a draft model with a pool of its own for windows")
        seq_lens = forward_batch.seq_lens.to(torch.int32) + tokens.unseen
        bound = max(tokens.keys, default=0)
        pages = min(_next_power(-(-bound // self.page_size)), self.pages)
        maps = [None] if self.mapping is None else [None, self.mapping]
        rows = (forward_batch.req_pool_indices, self.page_size, pages)
        first = self._first(forward_batch)
        tables = [page_table(self.req_to_token, *rows, mapping, first) for mapping in maps]
        steps = [self._step(tokens, forward_batch, seq_lens, table, bound) for table in tables]
        # Every key of a decoded token but its own is in the pool.
        whole = not tokens.decoded and tokens.new == tokens.keys
        self.batch = Batch(steps[0], whole=whole, tokens=tokens)
        if self.mapping is not None:
            self.batch.windowed = steps[1]
            self.batch.written = self.mapping[forward_batch.out_cache_loc]

    def _step(
        self,
        tokens: Tokens,
        forward_batch: Any,
        seq_lens: torch.Tensor,
        table: torch.Tensor,
        bound: int,
    ) -> Step:
        new, device = tokens.new, seq_lens.device
        if tokens.tree:  # every draft is a request with its own row of slots
            mask = tree_of(forward_batch.spec_info.custom_mask, forward_batch.seq_lens, new[0])
            table, seq_lens = tree_rows(table, forward_batch.seq_lens, mask)
            new = [1] * len(seq_lens)
        if tokens.decoded:
            most = new[0] if new and (new[0] == 1 or self._decodes(new[0])) else 0
            starts = torch.arange(len(new) + 1, dtype=torch.int32, device=device)
            starts = starts * new[0] if new and new[0] > 1 else starts
        else:
            most, starts = 0, _starts(forward_batch.extend_seq_lens)
        return make_step(new, starts, seq_lens, table, padded=sum(new), bound=bound, most=most)

    def _gathered(self, forward_batch: Any, step: Step, mapping: torch.Tensor | None) -> None:
        """Add the index of all keys to a step whose pages cannot be read in place; made once, when
        a layer asks."""
        tokens = self.batch.tokens if self.batch else None
        if step.gathered is None and tokens is not None:
            requests = forward_batch.req_pool_indices
            given = (self.req_to_token, requests, step.seq_lens, tokens.keys)
            step.gathered = keys_of(*given, mapping, self._first(forward_batch))

    def _first(self, forward_batch: Any) -> torch.Tensor | None:
        """Where the decoder's slots of each request begin: those of its encoder come first."""
        lengths = forward_batch.encoder_lens
        return None if lengths is None else lengths.long()

    def _cross_step(self, forward_batch: Any) -> Step:
        """The step of layers whose tokens see all keys of an encoder."""
        batch, requests = self.batch, forward_batch.req_pool_indices
        assert batch is not None
        lengths, known = forward_batch.encoder_lens.int(), list(forward_batch.encoder_lens_cpu)
        bound = max(known, default=0)
        table = page_table(self.req_to_token, requests, self.page_size, max(bound, 1))
        step = replace(
            batch.step, seq_lens=lengths, table=table, bound=bound, causal=False, gathered=None
        )
        if self.gathers and step.rest:
            step.gathered = keys_of(self.req_to_token, requests, lengths, known)
        return step

    def _local_step(self, forward_batch: Any) -> Step:
        """The step of layers whose tokens see the keys of their own chunk of positions, as SGLang
        serves Llama 4: each piece of a request in a chunk is a request with that chunk's pages."""
        chunk, requests = self.chunk, forward_batch.req_pool_indices
        tokens = self.batch.tokens if self.batch else None
        if not chunk or tokens is None or tokens.tree or chunk % self.page_size:
            raise NotImplementedError(
                f"layers that see chunks of {chunk} positions: only multiples of page_size "
                f"({self.page_size}), without branches of drafts or graphs of drafts"
            )
        pieces, device = pieces_of(tokens, chunk), self.device
        rows, first, keys = (
            torch.tensor(numbers, dtype=torch.int64, device=device)
            for numbers in (pieces.rows, pieces.first, pieces.keys)
        )
        requests, keys = requests[rows], keys.int()
        starts = _starts(torch.tensor(pieces.new, device=device))
        shape = (self.page_size, chunk // self.page_size)
        table = page_table(self.req_to_token, requests, *shape, self.mapping, first)
        most = 1 if set(pieces.new) == {1} else 0
        given = {"padded": sum(pieces.new), "bound": chunk, "most": most}
        step = make_step(pieces.new, starts, keys, table, **given)
        if self.gathers and step.rest:
            step.gathered = keys_of(
                self.req_to_token, requests, keys, pieces.keys, self.mapping, first
            )
        return step

    def _decodes(self, tokens: int) -> bool:
        return decodes(tokens, self.head_dim, self.head_dim)

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
        if self.chunk:
            table = (max_bs, self.chunk // self.page_size)
            self._buffers["local"] = torch.zeros(table, dtype=torch.int32, device=device)
            self._buffers["local_lens"] = torch.zeros(max_bs, dtype=torch.int32, device=device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Views of those tables for a graph's batch; what they hold is filled within the graph.

        Raises:
            NotImplementedError: for graphs of anything but decoding and chains of drafts.
        """
        count, buffers = forward_batch.batch_size, self._buffers
        number = graph_tokens(forward_batch, self.ahead)
        if number > 1 and self.gathers and not self._decodes(number):
            raise NotImplementedError(
                f"a graph of {number} drafts with page_size {self.page_size}: decode takes up to "
                f"{MAX_Q_TOKENS} tokens, and their keys cannot be gathered within a graph"
            )
        given = {
            "padded": count * number, "bound": self.pages * self.page_size, "most": number,
        }  # fmt: skip
        # `make_step` reads starts of tokens that are not decoded, and here all are.
        tables = (buffers["starts"], buffers["seq_lens"])
        new = [number] * count
        self.batch = batch = Batch(make_step(new, *tables, buffers["table"], **given))
        if self.mapping is not None:
            batch.windowed = make_step(new, *tables, buffers["windowed"], **given)
            batch.written = buffers["written"][: count * number]
        if self.chunk and number == 1:
            lengths, table = buffers["local_lens"], buffers["local"]
            given = {"padded": count, "bound": self.chunk, "most": 1}
            batch.local = make_step(new, buffers["starts"], lengths, table, **given)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Fill the tables, by operations that a graph repeats."""
        batch, requests = self.batch, forward_batch.req_pool_indices
        assert batch is not None  # `init_forward_metadata_out_graph` comes first
        batch.step.seq_lens.copy_(forward_batch.seq_lens)
        # The engine does not count drafts before they are verified.
        batch.step.seq_lens.add_(batch.step.tokens if batch.step.tokens > 1 else self.ahead)
        whole = (self.page_size, self.pages)
        batch.step.table.copy_(page_table(self.req_to_token, requests, *whole))
        if batch.windowed and batch.written is not None and self.mapping is not None:
            table = page_table(self.req_to_token, requests, *whole, self.mapping)
            batch.windowed.table.copy_(table)
            batch.written.copy_(self.mapping[forward_batch.out_cache_loc])
        if batch.local:
            first = (batch.step.seq_lens - 1).clamp_(min=0).long() // self.chunk * self.chunk
            batch.local.seq_lens.copy_(batch.step.seq_lens - first)
            shape = (self.page_size, self.chunk // self.page_size)
            table = page_table(self.req_to_token, requests, *shape, self.mapping, first)
            batch.local.table.copy_(table)

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
        batch, encodes = self.batch, _encodes(layer)
        assert batch is not None  # the engine describes a forward before it runs layers
        if save_kv_cache and new[0] is not None:
            where = KVWriteLoc.for_batch(forward_batch, swa_loc=batch.written)
            if layer.is_cross_attention:
                where = KVWriteLoc(forward_batch.encoder_out_cache_loc)
            scales = self._scales_of(layer)
            self.token_to_kv_pool.set_kv_buffer(
                layer, where, *new, *(s for s in scales if s is not None)
            )
        # Layers that share the keys of another one bring none.
        fresh = new if batch.whole and new[0] is not None and self._own else None
        fresh = None if layer.is_cross_attention else fresh
        step = self._step_of(layer, forward_batch, fresh is None)
        if encodes:
            drafts = batch.tokens is None or batch.tokens.decoded
            if fresh is None and not drafts:
                raise NotImplementedError(
                    "an encoder reads its own keys of a whole prompt: pass --chunked-prefill-size "
                    "-1 and --disable-radix-cache, and no other --kv-cache-dtype"
                )
            step = replace(step, causal=False)
        heads, kv_heads = layer.tp_q_head_num, layer.tp_k_head_num
        q = q.reshape(-1, heads, layer.qk_head_dim)
        buffers = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        k_pages, v_pages = (pages_of(buffer, kv_heads, self.page_size) for buffer in buffers)
        out = q.new_empty((q.shape[0], heads, layer.v_head_dim))
        attend(step, q, (k_pages, v_pages), out, self._scores_of(layer, sinks), fresh)
        return out.view(q.shape[0], heads * layer.v_head_dim)

    def _step_of(self, layer: Any, forward_batch: Any, from_pool: bool) -> Step:
        batch, mapping = self.batch, None
        assert batch is not None
        if layer.use_irope and self.chunk:
            batch.local = batch.local or self._local_step(forward_batch)
            return batch.local
        if layer.is_cross_attention:
            batch.cross = batch.cross or self._cross_step(forward_batch)
            return batch.cross
        step = batch.step
        if batch.windowed and self.token_to_kv_pool.layers_mapping[layer.layer_id][1]:
            step, mapping = batch.windowed, self.mapping
        if from_pool and self.gathers and step.rest:
            self._gathered(forward_batch, step, mapping)
        return step

    def _scores_of(self, layer: Any, sinks: torch.Tensor | None) -> Scores:
        """Made at a layer's first forward, and refused there. Sinks are read at each one, since an
        engine that trains loads new weights in place."""
        key = layer, self._scales_of(layer)
        found = self._scores.get(key)
        if found is None:
            _refuse_layer(layer)
            window, heads = layer.sliding_window_size, layer.tp_k_head_num
            k_scale, v_scale = (
                None if scale is None
                else torch.full((heads,), scale, dtype=torch.float32, device=self.device)
                for scale in key[1]
            )  # fmt: skip
            found = self._scores[key] = Scores(
                float(layer.scaling),
                window if window is not None and window > -1 else None,
                layer.logit_cap or None,
                None,
                k_scale,
                v_scale,
            )
        return found if sinks is None else replace(found, sinks=sinks.detach().float())

    def _scales_of(self, layer: Any) -> tuple[float | None, ...]:
        """Return (k_scale, v_scale), or None for both where there are none.

        A layer that lacks one in an FP8 cache is named by a warning: 1.0 is used there.

        Raises:
            ValueError: for scales that are not positive and finite.
        """
        if not self.is_fp8:
            return None, None
        scales = {name: _scale(layer, name) for name in ("k_scale", "v_scale")}
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


def _scale(layer: Any, name: str) -> float | None:
    """A scale of a checkpoint, or of the file of `--quantization-param-path`, which stands where
    checkpoints have a tensor."""
    known = getattr(layer, f"{name}_float")
    given = getattr(layer, name) if known is None else known
    return None if given is None else float(given)


def _encodes(layer: Any) -> bool:
    """Whether each token of a `RadixAttention` sees those behind it."""
    return str(getattr(layer.attn_type, "value", layer.attn_type)) == "encoder_only"


def _refuse_layer(layer: Any) -> None:
    """NotImplementedError for a `RadixAttention` whose masks or scores no kernel has."""
    kind = getattr(layer.attn_type, "value", layer.attn_type)
    if kind not in ("decoder", "encoder_only"):
        raise NotImplementedError(f"attention of kind {kind}: only decoders and encoders")
    if layer.xai_temperature_len > 0:
        raise NotImplementedError(
            f"xai_temperature_len {layer.xai_temperature_len}: only -1 (none)"
        )
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise NotImplementedError(
            f"logit_capping_method {layer.logit_capping_method!r}: only 'tanh'"
        )


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    starts = torch.zeros(lengths.shape[0] + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=starts[1:])
    return starts


def _next_power(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
