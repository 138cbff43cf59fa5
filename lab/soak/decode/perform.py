"""What `soak.py gqa` does."""

from __future__ import annotations

from functools import partial

from gqa_lowlatency.launch import ARCHS
from lab.soak.campaign import perform as campaign
from lab.soak.campaign.family import Family
from lab.soak.decode.draws import SIZES, Draws
from lab.soak.decode.features import FEATURES
from lab.soak.decode.trial import Trial

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
