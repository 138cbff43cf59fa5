"""PTX arithmetic on numpy arrays: storage formats, IEEE operations, approximations, integers."""

from __future__ import annotations

from typing import Any

# A Python scalar that is equal in all lanes, or an array with one element for each: a union would
# be cast at every use.
PerLane = Any
