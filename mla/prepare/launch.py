"""The operator `blackwell_kernels::mla_prepare_attention`: check, plan every part, launch once."""

from __future__ import annotations

from typing import Any

from kernelkit.call.launch import choose_target, launch
from kernelkit.call.operator import Operator
from kernelkit.compile.compiler import compile_once
from kernelkit.device.param_table import ParamTable
from kernelkit.device.param_words import nothing
from kvcache.movement.config import AppendParams
from kvcache.movement.launch import plan_append_swa
from mla.compressor import launch as compressor
from mla.compressor.arguments import Job
from mla.compressor.params import CompressParams
from mla.glue import launch as glue
from mla.glue.config import GlueParams
from mla.indexer import query_launch
from mla.indexer.params import QueryParams
from mla.indexer.query_launch import Prepared
from mla.prepare.arguments import Arguments
from mla.prepare.config import PrepareConfig, PrepareParams

ARCHS = ("sm_100a", "sm_90a")
KERNEL = "mla.prepare.kernel"
Plan = tuple[Any, Any, int]  # config, parameters and CTAs of a part
WORDS = {  # parameters of each part, in the order of their CTAs
    "entries": CompressParams, "index_keys": CompressParams, "index_queries": QueryParams,
    "queries": GlueParams, "window": AppendParams,
}  # fmt: skip


def outputs_of(given: Arguments) -> Prepared:
    """Allocate what `prepare_query` returns; empty tensors without queries."""
    query = given.query
    if query is not None:
        return query_launch.query_outputs(query)
    first, second, third = (given.cos.new_empty(0) for _ in range(3))
    return first, second, third


def run(given: Arguments) -> Prepared:
    """Write all parts, and return the prepared queries."""
    given.check()
    target = choose_target(given.cos.device, given.backend, given.arch, ARCHS)
    prepared = outputs_of(given)
    config, params, ctas = plan(given, prepared)
    if ctas:
        compiled = compile_once(config, target.arch, KERNEL)
        launch(compiled, (ParamTable.of(params), ctas), target, given.cos.device)
    return prepared


def plan(given: Arguments, prepared: Prepared) -> tuple[PrepareConfig, PrepareParams, int]:
    """Return the config, the parameters and the number of CTAs, 0 if there is nothing to do.

    NotImplementedError for parts that cannot share a launch.
    """
    query, heads, append = given.query, given.heads, given.append
    parts: dict[str, Plan] = {name: (None, nothing(kind), 0) for name, kind in WORDS.items()}
    parts |= {name: _compress(job) for name, job in given.jobs.items()}
    if query is not None:
        parts["index_queries"] = query_launch.plan(query, prepared)
    if heads is not None:
        parts["queries"] = glue.plan(heads)
    if append is not None:
        parts["window"] = plan_append_swa(append)
    config = PrepareConfig(**{name: part[0] for name, part in parts.items()})
    reason = config.refused()
    if reason:
        raise NotImplementedError(f"{reason} in one launch: call mla.compress for one of them")
    ranges, ctas = config.ranges([part[2] for part in parts.values()])
    words: dict[str, Any] = {name: part[1] for name, part in parts.items()}
    words |= {f"{name}_ctas": each for name, each in zip(parts, ranges, strict=True)}
    return config, PrepareParams(**words), ctas


def _compress(job: Job) -> Plan:
    """Return the plan of a compressor, in CTAs."""
    config, params, clusters = compressor.plan(job)
    return config, params, clusters * config.slices


PREPARE_ATTENTION = Operator(
    "mla_prepare_attention", Arguments, run, outputs_of, results=3,
    writes=("pools", "queries_out"), pools=True,
)  # fmt: skip
