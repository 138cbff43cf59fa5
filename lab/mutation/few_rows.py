"""The launch of a layer with few rows whose mutants are judged."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch

from lab.mutation.subject import Results
from moe.api import fused_moe
from moe.arguments import Router
from moe.mixed.few.launch import FewArguments
from moe.mixed.fragments import arrange
from moe.packing import pack


def few_rows(tokens: int = 17) -> Results:
    """Both products and the sum in two CTAs, whose rings wrap. The router's launch is before it.

    tokens: of two slots each; up to 16 have a lane each, and CTAs share chunks.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    w13, w2 = normal(4, 2 * 96, 160) / 4, normal(4, 160, 96) / 8
    config = FewArguments.config.fget
    with (
        mock.patch("moe.mixed.few.launch.sms_of", return_value=2),
        mock.patch.object(
            FewArguments, "config", property(lambda self: replace(config(self), warps=2, stages=2))
        ),
    ):
        given = normal(tokens, 160).bfloat16(), arrange(pack(w13, w2, "mxfp4")), normal(tokens, 4)
        return (fused_moe(*given, Router(2), arch="sm_90a", few_rows=True),)
