"""A heterogeneous paged KV cache: layouts as data, a manager, its memory, kernels, a planner."""

from typing import TYPE_CHECKING

from kernelkit.call.exports import exports

if TYPE_CHECKING:
    from kvcache.books.checkpoints import Policy
    from kvcache.books.errors import (
        CacheError,
        CorruptedBlock,
        DoubleFree,
        HostTierFull,
        InvariantBroken,
        NotResident,
        PoolExhausted,
        RollbackPastRing,
        StepOpen,
        TokensUnknown,
    )
    from kvcache.books.manager import Admission, Manager
    from kvcache.books.requests import Placeholders, Request
    from kvcache.books.slot_pool import Sizes
    from kvcache.books.step import Step
    from kvcache.books.work import Copy, Pool, Work
    from kvcache.layouts.layout import Layout, Ring, Stream, Tail
    from kvcache.layouts.page_tables import page_slots, page_table
    from kvcache.layouts.presets import PRESETS, Options, from_config, gqa, preset
    from kvcache.layouts.records import Record
    from kvcache.layouts.rows import Rows
    from kvcache.memory.cache import Cache
    from kvcache.movement.api import (
        append_pages,
        append_rows,
        append_swa,
        checksum,
        copy_slots,
        gather,
        gather_pages,
    )
    from kvcache.movement.warm import warmup
    from kvcache.planner.capacity import Mix, Plan, plan, usage

__all__ = [
    "PRESETS",
    "Admission",
    "Cache",
    "CacheError",
    "Copy",
    "CorruptedBlock",
    "DoubleFree",
    "HostTierFull",
    "InvariantBroken",
    "Layout",
    "Manager",
    "Mix",
    "NotResident",
    "Options",
    "Placeholders",
    "Plan",
    "Policy",
    "Pool",
    "PoolExhausted",
    "Record",
    "Request",
    "Ring",
    "RollbackPastRing",
    "Rows",
    "Sizes",
    "Step",
    "StepOpen",
    "Stream",
    "Tail",
    "TokensUnknown",
    "Work",
    "append_pages",
    "append_rows",
    "append_swa",
    "checksum",
    "copy_slots",
    "from_config",
    "gather",
    "gather_pages",
    "gqa",
    "page_slots",
    "page_table",
    "plan",
    "preset",
    "usage",
    "warmup",
]

__version__: str
exports(__name__, {
    "kvcache.memory.cache": "Cache",
    "kvcache.planner.capacity": "Mix Plan plan usage",
    "kvcache.books.checkpoints": "Policy",
    "kvcache.books.errors": "CacheError CorruptedBlock DoubleFree HostTierFull InvariantBroken "
    "NotResident PoolExhausted RollbackPastRing StepOpen TokensUnknown",
    "kvcache.movement.api": "append_pages append_rows append_swa checksum copy_slots gather "
    "gather_pages",
    "kvcache.layouts.layout": "Layout Ring Stream Tail",
    "kvcache.layouts.page_tables": "page_slots page_table",
    "kvcache.books.manager": "Admission Manager",
    "kvcache.layouts.presets": "PRESETS Options from_config gqa preset",
    "kvcache.layouts.records": "Record",
    "kvcache.books.requests": "Placeholders Request",
    "kvcache.layouts.rows": "Rows",
    "kvcache.books.slot_pool": "Sizes",
    "kvcache.books.step": "Step",
    "kvcache.movement.warm": "warmup",
    "kvcache.books.work": "Copy Pool Work",
})  # fmt: skip
