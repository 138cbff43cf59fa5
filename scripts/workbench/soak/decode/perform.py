"""What `soak.py gqa` does."""

from __future__ import annotations

from functools import partial

from gqa_lowlatency.launch import ARCHS
from workbench.soak.campaign import perform as campaign
from workbench.soak.campaign.family import Family
from workbench.soak.decode.draws import SIZES, Draws
from workbench.soak.decode.features import FEATURES
from workbench.soak.decode.trial import Trial

FAMILY = Family(
    "gqa",
    ARCHS,
    Draws,
    SIZES,
    Trial,
    FEATURES,
    {"O": "output", "LSE": "lse"},
)
perform = partial(campaign.perform, FAMILY)
