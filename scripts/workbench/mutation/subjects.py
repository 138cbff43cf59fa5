"""All kernels whose mutants are judged, by name."""

from __future__ import annotations

from workbench.mutation.attention import SUBJECTS as ATTENTION
from workbench.mutation.attention import Subject
from workbench.mutation.experts import SUBJECTS as EXPERTS

SUBJECTS: dict[str, Subject] = {**ATTENTION, **EXPERTS}
