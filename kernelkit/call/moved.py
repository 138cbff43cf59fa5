"""Old names of modules that have moved: they can be imported for one release, and warn.

`import kernelkit.tolerance` gives the very module `kernelkit.numerics.tolerance`, and FutureWarning
names both. What a package exports by its own name (`fmha.attention`) has not moved.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

_OF_KERNELKIT = {
    "plan": "arrivals:edges edges warps hw limits dtypes log2 smem_plan:smem tmem_plan:tmem",
    "device": (
        "block_scale:umma boxes branch:control buffers dependent device_table fake lanes narrow "
        "online_softmax param_table param_words pipelines registers:control "
        "shared_words swizzle:boxes table_kernel tmem tmem_fragments:tmem umma warp_mma words"
    ),
    "compile": (
        "aot arch artifact cuda host_object kernel keys names outside plan_names pristine "
        "signature sources store trace trusted version warm"
    ),
    "call": (
        "exports front launch operator options:front ranges schema:operator tape tensors "
        "writable:tensors call_plan:prepared"
    ),
    "tune": "stopwatch halving tuned:choices tune_command:command tuned_files:files",
    "merge": "merge_kernel:kernel merge_launch:launch merge_plan:plan",
    "numerics": "definition tolerance aligned_sums e2m1",
}
MOVED = {
    "fmha.sparse": "mla",
    "fmha.mma_sync": "fmha.portable",
    "fmha.device": "fmha.shared",
    "gqa_lowlatency.sm90": "gqa_lowlatency.portable",
    "gqa_lowlatency.device": "gqa_lowlatency.shared",
    "moe.device": "moe.shared",
    "moe.indices": "moe.arguments",
    "moe.mixed.device": "moe.mixed.shared",
    "integrations": "blackwell_engines",
    "q8_0.product.reference": "q8_0.reference",
} | {
    f"kernelkit.{old}": f"kernelkit.{folder}.{new or old}"
    for folder, words in _OF_KERNELKIT.items()
    for old, _, new in (word.partition(":") for word in words.split())
}
_TOPS = {name.partition(".")[0] for name in MOVED}


def now_called(name: str) -> str | None:
    """The name that a module has today, None for one that has not moved."""
    head, rest = name, ""
    while head:
        if head in MOVED:
            return MOVED[head] + rest
        head, dot, last = head.rpartition(".")
        rest = f"{dot}{last}{rest}"
    return None


def told(old: str, new: str) -> None:
    """Warn whoever imports `old`."""
    warnings.warn(f"{old} is now {new}; the old name will be removed", FutureWarning, stacklevel=3)


class Moved:
    """Finds a module by its old name, before other finders would make a second one of its file."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return (
            ModuleSpec(name, self) if name.partition(".")[0] in _TOPS and now_called(name) else None
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = now_called(spec.name)
        assert new is not None
        told(spec.name, new)
        module = import_module(new)
        spec.loader_state = module.__spec__  # the import system puts `spec` in its place
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Let old names be imported; once is enough."""
    if not any(isinstance(finder, Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, Moved())
