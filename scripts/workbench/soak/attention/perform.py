"""What `soak.py fmha` does."""

from __future__ import annotations

from functools import partial

from fmha.launch import ARCHS
from workbench.cases.attention_draws import SIZES, Draws
from workbench.soak.attention.features import FEATURES
from workbench.soak.attention.trial import Trial
from workbench.soak.campaign import perform as campaign
from workbench.soak.campaign.family import Family

FAMILY = Family(
    "fmha",
    ARCHS,
    Draws,
    SIZES,
    Trial,
    FEATURES,
    {"O": "output", "LSE": "lse"},
)
perform = partial(campaign.perform, FAMILY)
