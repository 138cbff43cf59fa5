"""What `soak.py rows` does."""

from __future__ import annotations

from functools import partial

from workbench.soak.campaign import perform as campaign
from workbench.soak.campaign.family import Family
from workbench.soak.rows.draws import SIZES, Draws
from workbench.soak.rows.features import FEATURES
from workbench.soak.rows.subjects import ARCHS
from workbench.soak.rows.trial import Trial

FAMILY = Family("rows", ARCHS, Draws, SIZES, Trial, FEATURES, {})
perform = partial(campaign.perform, FAMILY)
