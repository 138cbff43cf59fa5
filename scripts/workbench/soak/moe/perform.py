"""What `soak.py moe` does."""

from __future__ import annotations

from functools import partial

from moe.mixed.config import ARCHS
from workbench.soak.campaign import perform as campaign
from workbench.soak.campaign.family import Family
from workbench.soak.moe.draws import SIZES, Draws
from workbench.soak.moe.features import FEATURES
from workbench.soak.moe.trial import Trial

FAMILY = Family(
    "moe",
    ARCHS,
    Draws,
    SIZES,
    Trial,
    FEATURES,
    {"O": "output"},
)
perform = partial(campaign.perform, FAMILY)
