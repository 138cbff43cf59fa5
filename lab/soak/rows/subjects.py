"""All that is held to it that rows do not depend on each other."""

from __future__ import annotations

from lab.soak.rows import (
    attend,
    experts,
    merging,
    movement,
    products,
    quantise,
    routing,
    sparse,
)
from lab.soak.rows.subject import Subject

SUBJECTS: tuple[Subject, ...] = (
    *quantise.SUBJECTS, *routing.SUBJECTS, *experts.SUBJECTS, *products.SUBJECTS,
    *movement.SUBJECTS, *attend.SUBJECTS, *sparse.SUBJECTS, *merging.SUBJECTS,
)  # fmt: skip
ARCHS = tuple(dict.fromkeys(arch for subject in SUBJECTS for arch in subject.archs))
