"""`--quantization blackwell_kernels` of SGLang.

Plugins are loaded before SGLang's layers, so nothing here imports these.
"""

from __future__ import annotations

from blackwell_engines.engines.quantization import NAME, Asked


class BlackwellKernelsConfig(Asked):
    """`from_config` returns one of SGLang's configs with our experts."""

    configs = "blackwell_engines.sglang.experts"


def register() -> None:
    """Tell SGLang of NAME. SGLang asks its methods in order whether they override the
    checkpoint's, so ours is the first."""
    from sglang.srt.arg_groups.choices import QUANTIZATION_CHOICES
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS

    if NAME not in QUANTIZATION_CHOICES:
        QUANTIZATION_CHOICES.append(NAME)
        others = dict(QUANTIZATION_METHODS)
        QUANTIZATION_METHODS.clear()
        QUANTIZATION_METHODS.update({NAME: BlackwellKernelsConfig, **others})
