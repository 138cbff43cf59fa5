"""All that is held to it that rows do not depend on each other."""

from __future__ import annotations

from workbench.soak.rows import quantise
from workbench.soak.rows.subject import Subject

SUBJECTS: tuple[Subject, ...] = (*quantise.SUBJECTS,)
ARCHS = tuple(dict.fromkeys(arch for subject in SUBJECTS for arch in subject.archs))
