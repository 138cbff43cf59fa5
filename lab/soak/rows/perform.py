"""What `soak.py rows` does."""

from __future__ import annotations

from functools import partial

from lab.soak.campaign import perform as campaign
from lab.soak.campaign.family import Family
from lab.soak.rows.draws import SIZES, Draws
from lab.soak.rows.features import FEATURES
from lab.soak.rows.subjects import ARCHS
from lab.soak.rows.trial import Trial

FAMILY = Family("rows", ARCHS, Draws, SIZES, Trial, FEATURES, {})
perform = partial(campaign.perform, FAMILY)
