"""All kernels whose mutants are judged, by name."""

from __future__ import annotations

from tests.fmha.mutants import SUBJECTS as ATTENTION
from tests.fmha.mutants import Subject
from tests.moe.mutants import SUBJECTS as EXPERTS

SUBJECTS: dict[str, Subject] = {**ATTENTION, **EXPERTS}
