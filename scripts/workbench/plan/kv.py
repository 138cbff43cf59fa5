"""What plan.py does: the memory divided, and tables of what fits."""

from __future__ import annotations

import argparse

from kvcache.layouts.layout import Layout
from kvcache.planner.capacity import Plan, plan, workspace_bytes
from workbench.common import refuse, write_json
from workbench.flags import kvcache as _kv_args
from workbench.plan import tables as _kv_tables
from workbench.tables import show


def perform(options: argparse.Namespace) -> int:
    """What the flags ask for; returns the exit code."""
    try:
        plans = [plan_of(layout, options) for layout in layouts_of(options)]
    except ValueError as error:
        return refuse(error)
    documents = [_kv_tables.document(p, options.lengths, options.batched_tokens) for p in plans]
    show(*_kv_tables.layout_table([p.layout for p in plans]))
    show(*_kv_tables.split_table(plans))
    for made in plans:
        all_alike = f"all {made.requests:,} requests can have {made.longest(made.requests):,}"
        print(f"{_kv_args.label(made.layout)}: {made.why}; {all_alike} tokens each")
    print()
    for place, made in enumerate(plans):
        show(*_kv_tables.fit_table(made, options.lengths))
        show(*_kv_tables.stranded_table(made, options.lengths))
        if not _kv_tables.peer_of(made.layout):
            continue
        if made.layout.name not in [p.layout.name for p in plans[:place]]:
            show(*_kv_tables.vllm_groups(made.layout, options.batched_tokens))
        show(*_kv_tables.vllm_table(made, options.lengths, options.batched_tokens))
    if options.json:
        write_json(options.json, documents)
    if options.plot:
        _kv_tables.draw(options.plot, plans, options.batched_tokens)
    return 0


def layouts_of(options: argparse.Namespace) -> list[Layout]:
    return _kv_args.layouts(
        options.model or ["deepseek-v4-pro"],
        options.record,
        block_tokens=options.block_tokens,
        draft=options.draft,
        mtp=options.mtp,
        online_hca=options.online_hca,
    )


def plan_of(layout: Layout, options: argparse.Namespace) -> Plan:
    if options.weights >= options.memory:
        raise ValueError(
            f"--weights {options.weights:,} bytes leave nothing of --memory {options.memory:,}"
        )
    checkpoints, share = options.checkpoints if layout.has_state else (0, 0.0)
    return plan(
        layout,
        options.memory - options.weights,
        options.context,
        batch=options.batch,
        states=options.states if layout.has_state else 0,
        checkpoints=checkpoints,
        checkpoint_share=share,
        workspace=workspace_bytes(layout, options.workspace),
    )
