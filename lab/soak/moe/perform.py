"""What `soak.py moe` does."""

from __future__ import annotations

from functools import partial

from lab.soak.campaign import perform as campaign
from lab.soak.campaign.family import Family
from lab.soak.moe.draws import SIZES, Draws
from lab.soak.moe.features import FEATURES
from lab.soak.moe.trial import Trial
from moe.mixed.config import ARCHS

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
