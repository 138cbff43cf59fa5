"""Assumptions about compute capability 10.x that kernels rely on without a clear proof.

No kernel known to run there shows them, or the manual does not clearly promise them. Each has a
problem that needs it, and a way to avoid it. The emulator follows the manual, or our reading of it.
If a B200 differs, the problem gives wrong results there, and `avoid` says what to try next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MEDIUM, LOW_MEDIUM, LOW = "medium", "low to medium", "low"
_LAYER = "--hidden 256 --intermediate 128 --experts 4 --top-k 2"
_WIDE = "--hidden 256 --intermediate 128 --experts 2 --top-k 2"


@dataclass(frozen=True)
class Assumption:
    """An assumption about the hardware.

    name: name of its step.
    risk: risk that it does not hold.
    words: what the kernels rely on.
    others: other software that relies on it, or does not.
    kind, flags: problem of run.py that needs it.
    avoid: a workaround; '' if there is none.
    mended: whether kernels no longer rely on the risky form, and the problem shows that the
    safe one works."""

    name: str
    risk: str
    words: str
    others: str
    kind: str
    flags: str
    avoid: str = ""
    mended: bool = False

    @property
    def about(self) -> str:
        """Describe the assumption in one line."""
        way = f"; to avoid it: {self.avoid}" if self.avoid else ""
        mended = "mended: " if self.mended else f"{self.risk} risk: "
        return f"{mended}{self.words} ({self.others}){way}"


ASSUMPTIONS = (
    Assumption(
        "accumulator-columns", MEDIUM,
        "accumulators of 256 columns begin at multiples of 16 columns of tensor memory",
        "no rule was found; nothing known begins at less than 16 with N = 256",
        "moe", f"--tokens 300 --tile-n 256 --format mxfp8 {_WIDE}", mended=True,
    ),
    Assumption(
        "pair-allocation", LOW_MEDIUM,
        "tensor memory of a pair is allocated behind a barrier of the cluster",
        "the manual wants the peer to be launched; 9 of 10 known kernels of pairs do so",
        "fmha", "--q-len 300 --kv-len 300 --head-dim 256", mended=True,
    ),
    Assumption(
        "products-in-order", LOW_MEDIUM,
        "products of one thread take effect in order, also on different accumulators: Q K^T "
        "overwrites the P in tensor memory that P V reads",
        "FlashAttention-4 relies on it; the manual orders equal shapes and accumulators",
        "fmha", "--schedule pingpong --q-len 300 --kv-len 600 --head-dim 64",
        "instructions='mma.sync', which needs no tensor memory",
    ),
    Assumption(
        "copy-behind-product", LOW,
        "a copy of scale factors is ordered behind the product that reads the older ones",
        "CUTLASS relies on it; the manual has the other direction alone",
        "moe", f"--tokens 40 --format nvfp4 {_LAYER.replace('256', '2048', 1)}",
        "experts in bf16 or arranged ones",
    ),
    Assumption(
        "few-columns", LOW_MEDIUM,
        "block-scaled products with N = 8, 16 and 32 and M = 128",
        "legal; CUTLASS stops at 64, DeepGEMM at 16, names in trtllm-gen have 8",
        "moe", f"--tokens 3 --format nvfp4 {_LAYER}",
        "tile_rows=64",
    ),
    Assumption(
        "decode-columns-8-bit", LOW,
        "products of e4m3 with N = 8 and 16, and M = 128 and 64, with A along M",
        "legal; names in trtllm-gen",
        "gqa", "--kv-len 300 --kv-dtype e4m3 --scales --q-heads 8 --kv-heads 4",
        "max_columns=16, or a cache in bf16",
    ),
    Assumption(
        "decode-columns-16-bit", LOW,
        "products of f16 with M = 64 and N = 8, and with A along M",
        "legal; CUTLASS runs M = 64, N = 32",
        "gqa", "--kv-len 300 --head-dim 64 --q-heads 8 --kv-heads 4 --dtype fp16",
    ),
    Assumption(
        "scale-copy-stride", LOW,
        "tcgen05.cp of 32x128b with a leading stride of 16 bytes",
        "CUTLASS has 16, DeepGEMM 0",
        "moe", f"--tokens 9 --format mxfp4 {_LAYER}", mended=True,
    ),
    Assumption(
        "stores-to-peers", LOW,
        "st.async of one and two words, also to the own CTA; expect_tx with .relaxed.cta and waits "
        "with .acquire.cluster",
        "run on Hopper; FlashInfer stores four words to peers",
        "gqa", "--kv-len 1100 --cluster 4",
        "cluster=1",
    ),
    Assumption(
        "expect-nothing", LOW,
        "expect_tx of 0 bytes, for entries without keys in a tile",
        "nothing forbids it",
        "fmha", "--q-len 70 --kv-len 300 --kv-lens 300,0",
        "tensors without kv_lens",
    ),
    Assumption(
        "barriers-of-pairs", LOW,
        "arrivals at the peer's barriers and waits for them name the scope of a CTA, and fences of "
        "tcgen05 order tensor memory",
        "the manual names the cluster, relaxed, which makes the same machine code; CUTLASS's "
        "kernels of pairs name the CTA",
        "moe", f"--tokens 300 --format nvfp4 {_LAYER}",
    ),
    Assumption(
        "fence-before-dealloc", LOW,
        "uses of tensor memory are ordered by a fence before it is freed",
        "none of the known kernels has the fence; it costs nothing",
        "fmha", "--q-len 130 --kv-len 130 --head-dim 128", mended=True,
    ),
    Assumption(
        "two-ctas-exactly", LOW,
        "two CTAs of 115,712 bytes and 256 columns fit an SM, or the second one waits in its "
        "allocation",
        "legal",
        "fmha", "--schedule base --batch 4 --q-len 600 --kv-len 300 --q-heads 8 --head-dim 64",
        "schedule='pingpong'",
    ),
)  # fmt: skip


def problems() -> Iterator[tuple[str, str, str, str]]:
    """(name, kind and flags of run.py, words) of each."""
    for each in ASSUMPTIONS:
        yield each.name, each.kind, each.flags, each.about
