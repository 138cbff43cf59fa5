"""What plan.py does: the memory divided, and tables of what fits."""

from __future__ import annotations

import argparse

from kvcache.layouts.layout import GUARD_BYTES, Layout
from kvcache.planner.capacity import Plan, plan, workspace_bytes
from lab.cache_model import tables as _kv_tables
from lab.flags.kvcache import label, layouts
from lab.tools.common import refuse, write_json
from lab.tools.tables import show, table


def perform(options: argparse.Namespace) -> int:
    try:
        names = ("block_tokens", "draft", "mtp", "online_hca")
        models = options.model or ["deepseek-v4-pro"]
        asked = {name: getattr(options, name) for name in names}
        plans = [plan_of(layout, options) for layout in layouts(models, options.record, **asked)]
    except ValueError as error:
        return refuse(error)
    documents = [_kv_tables.document(p, options.lengths, options.batched_tokens) for p in plans]
    title = f"Layouts (every slot ends in {GUARD_BYTES} guard bytes)"
    show(*table(title, _kv_tables.LAYOUTS, documents))
    title = f"Memory, divided for requests of {_kv_tables.mix_words(plans[0].mix)}"
    show(*table(title, _kv_tables.SPLIT, documents))
    for made in plans:
        all_alike = f"all {made.requests:,} requests can have {made.longest(made.requests):,}"
        print(f"{label(made.layout)}: {made.why}; {all_alike} tokens each")
    print()
    known: set[str] = set()  # of models, whatever their records
    for made, document in zip(plans, documents, strict=True):
        title = f"{document['layout']}: a request, and how many fit; one alone has "
        show(*table(f"{title}{document['longest']:,} tokens", _kv_tables.FITS, document["fits"]))
        show(*_kv_tables.stranded_table(document))
        if "vllm" not in document:
            continue
        if made.layout.name not in known:
            show(*_kv_tables.vllm_groups(made.layout, options.batched_tokens))
        known.add(made.layout.name)
        show(*_kv_tables.vllm_table(document, made.layout.name))
    if options.json:
        write_json(options.json, documents)
    if options.plot:
        _kv_tables.draw(options.plot, plans, options.batched_tokens)
    return 0


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
