"""Of which calls a soak keeps count."""

from __future__ import annotations

from workbench.soak.campaign.record import Feature
from workbench.soak.rows.hostile import CONTENTS
from workbench.soak.rows.subjects import SUBJECTS

FEATURES: dict[str, Feature] = {
    **{one.name: lambda case, one=one: case.subject == one.name for one in SUBJECTS},
    **{f"row of {name}": lambda case, name=name: case.contents == name for name in CONTENTS},
}
