"""What `soak.py fmha` does."""

from __future__ import annotations

from functools import partial

from fmha.launch import ARCHS
from lab.problems.attention_draws import SIZES, Draws
from lab.soak.attention.features import FEATURES
from lab.soak.attention.trial import Trial
from lab.soak.campaign import perform as campaign
from lab.soak.campaign.family import Family

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
