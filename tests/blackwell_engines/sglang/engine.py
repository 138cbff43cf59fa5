"""Stand-ins for the parts of SGLang 0.5.23 that the plugin needs, and a driver that uses the plugin
as the engine does.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import IntEnum, auto
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.blackwell_engines.requests import LayerShape, Request, packed, stand_ins

# ---- Stand-ins for SGLang 0.5.23, in a few lines: the base class, pools, the registry

BACKENDS: dict[str, Any] = {}
CHOICES = ["triton"]
HOOKS: list[Any] = []


class AttentionBackend:
    """The part of SGLang's base class that a forward needs."""

    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_decode():
            return self.forward_decode(q, k, v, layer, batch, save_kv_cache=True, **kwargs)
        return self.forward_extend(q, k, v, layer, batch, save_kv_cache=True, **kwargs)


class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND_V2 = auto()
    DLLM_EXTEND = auto()

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    is_decode_or_idle = is_decode

    def is_draft_extend_v2(self) -> bool:
        return self is ForwardMode.DRAFT_EXTEND_V2

    def is_context_parallel_extend(self, include_draft_extend_v2: bool = False) -> bool:
        drafts = include_draft_extend_v2 and self is ForwardMode.DRAFT_EXTEND_V2
        return drafts or self in (ForwardMode.EXTEND, ForwardMode.MIXED)

    def is_target_verify(self) -> bool:
        return self is ForwardMode.TARGET_VERIFY


@dataclass
class KVWriteLoc:
    loc: torch.Tensor
    swa_loc: torch.Tensor | None = None

    @classmethod
    def for_batch(cls, batch: Any, swa_loc: torch.Tensor | None = None) -> KVWriteLoc:
        return cls(batch.out_cache_loc, swa_loc)


class Pool:
    """Slots of K and V of layer 0, NaN at first, which the engine writes itself. With windowed
    slots, layer 1 has a window and fewer slots, to which `full_to_swa_index_mapping` maps.
    """

    def __init__(
        self, shape: LayerShape, slots: int, windowed: int = 0, device: str = "cpu"
    ) -> None:
        dtype, row = shape.kv_dtype or shape.dtype, (shape.kv_heads, shape.head_dim)
        self.buffers = [
            [torch.full((n, *row), torch.nan, device=device).to(dtype) for _ in "kv"]
            for n in (slots, windowed)
        ]
        if windowed:
            self.full_to_swa_index_mapping = torch.full((slots,), -1, device=device)
            self.layers_mapping = {0: (0, False), 1: (0, True)}

    def get_kv_buffer(self, layer_id: int) -> list[torch.Tensor]:
        return self.buffers[layer_id]

    def set_kv_buffer(
        self, layer: Any, where: KVWriteLoc, k: Any, v: Any, k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:  # fmt: skip
        slots = where.swa_loc if layer.layer_id else where.loc
        for buffer, x, scale in zip(
            self.buffers[layer.layer_id], (k, v), (k_scale, v_scale), strict=True
        ):
            if buffer.dtype != x.dtype:
                x.div_(scale)  # in place, as the engine does it
            whole = torch.uint8 if buffer.itemsize == 1 else buffer.dtype
            buffer.view(whole)[slots] = x.to(buffer.dtype).view(whole)


class Layer(SimpleNamespace):
    """Hashed by identity, as a module is."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


def layer_of(shape: LayerShape, layer_id: int = 0, **changes: Any) -> Layer:
    """The fields of a `RadixAttention` that the plugin reads."""
    window = shape.window if layer_id == 0 or shape.window is not None else None
    return Layer(**{
        "layer_id": layer_id, "tp_q_head_num": shape.q_heads, "tp_k_head_num": shape.kv_heads,
        "qk_head_dim": shape.head_dim, "v_head_dim": shape.head_dim,
        "scaling": shape.head_dim**-0.5, "logit_cap": shape.softcap or 0.0,
        "logit_capping_method": "tanh", "sliding_window_size": -1 if window is None else window,
        "is_cross_attention": False, "attn_type": SimpleNamespace(value="decoder"),
        "xai_temperature_len": -1, "use_irope": False, "k_scale": None, "v_scale": None,
        "k_scale_float": shape.scales[0], "v_scale_float": shape.scales[1],
    } | changes)  # fmt: skip


def modules() -> dict[str, ModuleType]:
    """Map the names under which the plugin imports modules to stand-ins."""

    def register_attention_backend(name: str) -> Any:
        return lambda made: BACKENDS.setdefault(name, made)

    def register_resolution_hook(name: str) -> Any:
        return lambda hook: HOOKS.append((name, hook))

    def declare_resolution(server_args: Any, source: str, **fields: Any) -> None:
        server_args.declared.append(fields)

    class HookRegistry:
        register = staticmethod(lambda *hook: HOOKS.append(hook))

    contents = {
        "plugins.hook_registry": {
            "HookRegistry": HookRegistry,
            "HookType": SimpleNamespace(AROUND="around"),
        },
        "arg_groups.resolution_hooks": {"register_resolution_hook": register_resolution_hook},
        "arg_groups.overrides": {"declare_resolution": declare_resolution},
        "arg_groups.model_override_base": {
            "model_config_of": lambda server_args: server_args.model_config,
            "resolved_view": lambda server_args: SimpleNamespace(**server_args.fields()),
        },
        "layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
        "layers.attention.attention_registry": {
            "register_attention_backend": register_attention_backend
        },
        "mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc},
        "arg_groups.choices": {"ATTENTION_BACKEND_CHOICES": CHOICES, "QUANTIZATION_CHOICES": []},
        "layers.quantization": {"QUANTIZATION_METHODS": {}},
    }
    return stand_ins({f"sglang.srt.{path}": names for path, names in contents.items()})


# ---- A driver that does what SGLang does with an attention backend, step by step, for one or two
# layers
#
# Slots are taken from a pool page by page, in random order, and given back; `req_to_token` holds
# the slots of each request. Prompts may find a prefix in the pool. A step in a graph is filled as
# it would be within the graph. Memory that was never written is NaN.

ROWS, POSITIONS, SLOTS, WINDOWED = 5, 128, 256, 128


class Engine:
    """Driver.

    windowed: adds a second layer, which has a window and its own pool
    chunk: layers with `use_irope` see so many positions
    """

    def __init__(
        self,
        plugin: ModuleType,
        shape: LayerShape,
        *,
        page_size: int = 1,
        windowed: bool = False,
        chunk: int | None = None,
        device: str = "cpu",
    ) -> None:
        self.shape, self.page_size, self.windowed = shape, page_size, windowed
        self.chunk, self.device = chunk, device
        self.pool = Pool(shape, SLOTS, WINDOWED if windowed else 0, device)
        self.req_to_token = torch.zeros((ROWS, POSITIONS), dtype=torch.int32, device=device)
        pick = random.Random(page_size)
        # Rows of padding write to page 0.
        self.free, self.free_windowed = (
            pick.sample(pages, len(pages))
            for pages in (range(1, n // page_size) for n in (SLOTS, WINDOWED))
        )
        self.runner = SimpleNamespace(
            token_to_kv_pool=self.pool, page_size=page_size, device="cpu",
            req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token),
            kv_cache_dtype=shape.kv_dtype or shape.dtype, dtype=shape.dtype,
            model_config=SimpleNamespace(head_dim=shape.head_dim),
            kv_index_translator=SimpleNamespace(is_translating=False), attention_chunk_size=chunk,
        )  # fmt: skip
        self.backend = plugin.BlackwellKernelsBackend(self.runner)
        whole = LayerShape(**{**vars(shape), "window": None})
        self.layers = [layer_of(shape)]
        if windowed:
            self.layers = [layer_of(whole), layer_of(shape, 1)]
        self.requests: dict[int, Request] = {}

    def admit(self, name: int, length: int, prefix_of: int | None = None, prefix: int = 0) -> None:
        """Admit a request in row `name`; with `prefix_of`, its first tokens are already in the
        pool.
        """
        request = self.requests[name] = Request(name, self.shape, length)
        if prefix_of is not None:
            other = self.requests[prefix_of]
            request.q[:prefix], request.k[:prefix] = other.q[:prefix], other.k[:prefix]
            request.v[:prefix], request.done = other.v[:prefix], prefix
            self.req_to_token[name, :prefix] = self.req_to_token[prefix_of, :prefix]

    def retract(self, name: int) -> None:
        """Give the request's slots back to the pool; it will start again."""
        request, size = self.requests[name], self.page_size
        slots = self.req_to_token[name, : request.done : size]
        self.free += (slots // size).tolist()
        if self.windowed:
            windowed = self.pool.full_to_swa_index_mapping[slots.long()]
            self.free_windowed += (windowed[windowed >= 0] // size).tolist()
        request.done = 0

    def _allocate(self, request: Request, new: int) -> None:
        size = self.page_size
        for position in range(request.done, request.done + new):
            if position % size == 0:
                page = self.free.pop() * size
                if self.windowed:
                    inner = self.free_windowed.pop() * size
                    mapping = self.pool.full_to_swa_index_mapping
                    mapping[page : page + size] = torch.arange(inner, inner + size)
            else:
                page = int(self.req_to_token[request.name, position - 1]) + 1 - position % size
            self.req_to_token[request.name, position] = page + position % size

    def forward_batch(
        self, plan: dict[int, int], mode: ForwardMode, spec_info: Any = None
    ) -> SimpleNamespace:
        """Build a batch with the fields that the plugin reads."""
        order, new = [self.requests[name] for name in plan], [*plan.values()]
        for request, count in zip(order, new, strict=True):
            self._allocate(request, count)
        done = torch.tensor([request.done for request in order])
        lengths = done if mode.is_target_verify() else done + torch.tensor(new)
        slots = torch.cat([
            self.req_to_token[r.name, r.done : r.done + n].long()
            for r, n in zip(order, new, strict=True)
        ])  # fmt: skip
        return SimpleNamespace(
            forward_mode=mode, batch_size=len(order), spec_info=spec_info, out_cache_loc=slots,
            req_pool_indices=torch.tensor([r.name for r in order], device=self.device),
            seq_lens=lengths.to(self.device), seq_lens_cpu=lengths,
            extend_seq_lens=torch.tensor(new, device=self.device),
            extend_seq_lens_cpu=None if mode.is_decode() else new, encoder_lens=None,
        )  # fmt: skip

    def step(
        self,
        plan: dict[int, int],
        *,
        mode: str = "EXTEND",
        graph: bool = False,
        spec_info: Any = None,
        ancestors: list[list[int]] | None = None,
    ) -> None:
        """Run a step, and judge every new token of every layer.

        ancestors: of each request's drafts, the numbers of those that it sees, itself last; then no
            draft is accepted.
        """
        batch = self.forward_batch(plan, ForwardMode[mode], spec_info)
        if graph:
            self.backend.init_forward_metadata_out_graph(batch)
            self.backend.init_forward_metadata_in_graph(batch)
        else:
            self.backend.init_forward_metadata(batch)
        order = [self.requests[name] for name in plan]
        new = [slice(r.done, r.done + n) for r, n in zip(order, plan.values(), strict=True)]
        for layer in self.layers:
            q, k, v = (
                packed([getattr(r, x)[part] for r, part in zip(order, new, strict=True)],
                       len(batch.out_cache_loc)) for x in "qkv"
            )  # fmt: skip
            q, k, v = (x.to(self.device) for x in (q, k, v))
            logits = self.shape.sink_logits
            sinks = {} if logits is None else {"sinks": logits.to(self.device)}
            out = self.backend.forward(q.flatten(1), k, v, layer, batch, **sinks)
            first = 0
            for request, part in zip(order, new, strict=True):
                size = part.stop - part.start
                heads = out[first : first + size].unflatten(1, (self.shape.q_heads, -1))
                self._judge(request, layer, heads.cpu(), part, ancestors)
                first += size
        for request, part in zip(order, new, strict=True):
            request.done = part.start if ancestors else part.stop
            if self.windowed:
                self._give_back(request)

    def _judge(
        self, request: Request, layer: Any, heads: torch.Tensor, new: slice,
        ancestors: list[list[int]] | None,
    ) -> None:  # fmt: skip
        windowed = not (self.windowed and layer.layer_id == 0)
        causal = layer.attn_type.value == "decoder"
        if ancestors:
            for draft, seen in enumerate(ancestors):
                rows = [*range(new.start), *(new.start + n for n in seen)]
                alone = replace(request)
                alone.q, alone.k, alone.v = (getattr(request, x)[rows] for x in "qkv")
                alone.judge(heads[draft : draft + 1], len(rows) - 1, windowed=windowed)
        elif layer.use_irope and self.chunk:
            for position in range(new.start, new.stop):
                begin = position // self.chunk * self.chunk
                alone, row = replace(request), position - new.start
                alone.q, alone.k, alone.v = (getattr(request, x)[begin:] for x in "qkv")
                alone.judge(heads[row : row + 1], position - begin, windowed=False)
        else:
            request.judge(heads, new.start, windowed=windowed, causal=causal)

    def _give_back(self, request: Request) -> None:
        """Free slots that no window will see again: they become NaN, and the mapping drops them."""
        size, mapping = self.page_size, self.pool.full_to_swa_index_mapping
        last = max(request.done - (self.shape.window or 0) - 1, 0) // size * size
        for page in self.req_to_token[request.name, :last:size].tolist():
            inner = int(mapping[page])
            if inner >= 0:
                self.free_windowed.append(inner // size)
                mapping[page : page + size] = -1
                for buffer in self.pool.buffers[1]:
                    buffer[inner : inner + size] = torch.nan
