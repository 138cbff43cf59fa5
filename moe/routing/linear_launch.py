"""The operator of a router with its linear layer: check the tensors, allocate, describe the launch.

Nothing here reads a tensor on a GPU, so a CUDA graph can capture it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from kernelkit.call.launch import choose_target, launch
from kernelkit.call.operator import Operator
from kernelkit.call.tensors import (
    DTYPE_NAMES,
    plain_table,
    require_rank,
    require_table,
    require_tensors,
    require_tma,
)
from kernelkit.compile.compiler import compile_once
from moe.arguments import Router, RouterLinear, check_bias
from moe.routing.config import LinearConfig
from moe.routing.launch import (
    ARCHS,
    BIASES,
    Choices,
    OrderTables,
    biases_of,
    config_for,
    config_of,
    run_route,
    scales_of,
    writing,
)


@dataclass(frozen=True, eq=False)
class TokenChoices:
    """The arguments of `moe.route_tokens`."""

    x: torch.Tensor
    linear: RouterLinear
    router: Router
    backend: str = "auto"
    arch: str | None = None


def run_route_tokens(
    given: TokenChoices, order: OrderTables | None = None, cleared: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids, weights): one launch, or for many tokens torch's linear layer and one launch.
    For a single token it also writes the order of its slots. cleared: int32, which become zeros."""
    layer, router = given.linear, given.router
    config = _checked_config(given)
    if len(given.x) > config.most_tokens:
        logits = linear(given.x, layer.weight, layer.bias)
        where = {"backend": given.backend, "arch": given.arch}
        return run_route(Choices(logits=logits, **vars(router), **where), order, cleared)
    scales, biases = scales_of(router), biases_of(router)
    x, weight = plain_table(given.x), plain_table(layer.weight)
    tables = (plain_table(layer.bias), *(plain_table(biases.get(name)) for name in BIASES))
    config = LinearConfig(
        writing(config_for(config.route, *tables), order, cleared),
        config.hidden,
        config.weight_bias,
        config.ready,
    )
    target = choose_target(x.device, given.backend, given.arch, ARCHS)
    ids, weights = empty_token_choices(given)
    if len(x):
        outputs = ids.view(-1), weights.view(-1)
        arguments = ((x, weight, *tables), outputs, scales, order, cleared)
        compiled = compile_once(config, target.arch, "moe.routing.linear_kernel")
        launch(compiled, arguments, target, x.device)
    return ids, weights


def empty_token_choices(given: TokenChoices) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate ids and weights."""
    new, shape = given.x.new_empty, (given.x.shape[0], given.router.slots)
    return new(shape, dtype=torch.int32), new(shape, dtype=torch.float32)


def _checked_config(given: TokenChoices) -> LinearConfig:
    x, layer, biases = given.x, given.linear, biases_of(given.router)
    weight, tables = layer.weight, dict(biases)
    if layer.bias is not None:
        tables["linear.bias"] = layer.bias
    require_tensors(x=x, **{"linear.weight": weight}, **tables)
    require_rank("x", x, "[T, H]")
    require_rank("linear.weight", weight, "[E, H]")
    if x.dtype not in DTYPE_NAMES or x.dtype == torch.float32:
        raise NotImplementedError(f"x is {x.dtype}: bfloat16 or float16")
    (experts, _), hidden = weight.shape, x.shape[1]
    require_table("linear.weight", weight, x.dtype, (None, hidden))
    for name, table in tables.items():
        dtype = x.dtype if table is layer.bias else torch.float32
        require_table(name, table, dtype, (experts,))
    for name, bias in biases.items():
        check_bias(name, bias)
    route = config_of(given.router, experts, x.dtype)
    config = LinearConfig(route, hidden, layer.bias is not None, layer.ready)
    config.check()
    require_tma("x", x)
    require_tma("linear.weight", weight)
    return config


ROUTE_TOKENS = Operator(
    "moe_route_tokens", TokenChoices, run_route_tokens, empty_token_choices, results=2
)
