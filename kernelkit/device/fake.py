"""Stand-ins for tensors with which host functions are compiled (imports the DSL)."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor


def fake_tensor(
    dtype: type[cutlass.Numeric], *shape: int | cute.SymInt, align: int | None = None
) -> Any:
    """A tensor whose last dim is contiguous and whose other strides are dynamic.

    align: bytes of which the address and these strides are multiples, an element's by default.
    """
    unit = (align or 0) * 8 // dtype.width or 1
    strides = (cute.sym_int64(divisibility=unit) for _ in shape[1:])
    return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=align)
