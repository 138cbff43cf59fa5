"""Scales of FP8 caches as engines load them, checked before a kernel reads them."""

from __future__ import annotations

from kernelkit.plan.limits import FLT_MAX

ADVICE = (
    "the checkpoint sets no scale for this layer's FP8 cache. Use a checkpoint with calibrated "
    "scales, let the engine calculate them, or choose another dtype for the cache"
)


def cache_scales(layer: object, **scales: float) -> tuple[float, ...]:
    """Return the scales of a layer's FP8 cache.

    Args:
        layer: the layer's name or number, for the message.
        scales: by name; engines use -1.0 for a scale that was not in the checkpoint.

    Raises:
        ValueError: for a scale that is not positive and finite.
    """
    for name, scale in scales.items():
        if not 0 < scale <= FLT_MAX:
            raise ValueError(
                f"layer {layer}: {name} is {scale}, expected a positive finite number: {ADVICE}"
            )
    return tuple(map(float, scales.values()))
