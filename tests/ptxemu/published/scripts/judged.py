"""What the scripts of this folder print at their end: the largest error, in one line of JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np


def report(*pairs: tuple[Any, Any]) -> None:
    """Print the largest error of pairs of a result and its definition.

    Args:
        pairs: tensors of torch or arrays of numpy, in pairs of the same shape.

    `error` is the largest absolute difference, `largest` the largest magnitude of a definition. An
    infinity or NaN that only the result has is an infinite error.
    """
    errors, values = [], []
    for result, definition in pairs:
        found, right = _float64(result), _float64(definition)
        if found.shape != right.shape:
            raise ValueError(f"the result has shape {found.shape}, its definition {right.shape}")
        with np.errstate(invalid="ignore"):  # infinities minus themselves
            difference = np.abs(np.where(found == right, 0.0, found - right)).max()
        errors.append(float(difference) if np.isfinite(difference) else float("inf"))
        values.append(float(np.abs(right).max()))
    print(json.dumps({"error": max(errors), "largest": max(values)}))


def _float64(values: Any) -> np.ndarray:
    if hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, np.float64)
