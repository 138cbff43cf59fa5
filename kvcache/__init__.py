"""A heterogeneous paged KV cache: layouts as data, a manager, its memory, kernels, a planner."""

from typing import TYPE_CHECKING

from kernelkit.exports import exports

if TYPE_CHECKING:
    from kvcache.cache import Cache
    from kvcache.capacity import Mix, Plan, plan, usage
    from kvcache.checkpoints import Policy
    from kvcache.errors import (
        CacheError,
        CorruptedBlock,
        DoubleFree,
        HostTierFull,
        InvariantBroken,
        NotResident,
        PoolExhausted,
        RollbackPastRing,
        StepOpen,
    )
    from kvcache.kernels.api import append_rows, append_swa, checksum, copy_slots, gather
    from kvcache.layout import Layout, Ring, Stream, Tail
    from kvcache.manager import Admission, Manager, Sizes
    from kvcache.presets import PRESETS, Options, from_config, gqa, preset
    from kvcache.records import Record
    from kvcache.requests import Request
    from kvcache.rows import Rows
    from kvcache.step import Step
    from kvcache.warm import warmup
    from kvcache.work import Copy, Pool, Work

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
    "Work",
    "append_rows",
    "append_swa",
    "checksum",
    "copy_slots",
    "from_config",
    "gather",
    "gqa",
    "plan",
    "preset",
    "usage",
    "warmup",
]

__getattr__, __dir__ = exports(__name__, {
    "kvcache.cache": "Cache",
    "kvcache.capacity": "Mix Plan plan usage",
    "kvcache.checkpoints": "Policy",
    "kvcache.errors": "CacheError CorruptedBlock DoubleFree HostTierFull InvariantBroken "
    "NotResident PoolExhausted RollbackPastRing StepOpen",
    "kvcache.kernels.api": "append_rows append_swa checksum copy_slots gather",
    "kvcache.layout": "Layout Ring Stream Tail",
    "kvcache.manager": "Admission Manager Sizes",
    "kvcache.presets": "PRESETS Options from_config gqa preset",
    "kvcache.records": "Record",
    "kvcache.requests": "Request",
    "kvcache.rows": "Rows",
    "kvcache.step": "Step",
    "kvcache.warm": "warmup",
    "kvcache.work": "Copy Pool Work",
})  # fmt: skip
