"""Of which calls a soak keeps count."""

from __future__ import annotations

from lab.soak.campaign.record import Feature
from lab.soak.rows.hostile import CONTENTS
from lab.soak.rows.subjects import SUBJECTS

FEATURES: dict[str, Feature] = {
    **{one.name: lambda case, one=one: case.subject == one.name for one in SUBJECTS},
    **{f"row of {name}": lambda case, name=name: case.contents == name for name in CONTENTS},
}
