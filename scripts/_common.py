"""What several scripts need: a kernel config from the command line, and its one-line name."""

from __future__ import annotations

import argparse
import dataclasses

import _cases
from _flags import add_case_arguments, case_of
from fmha.config import AttentionConfig

PLAIN_SHAPE = "1,128,128,1,1"


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a case; of its shape the config only depends through the packing of heads."""
    add_case_arguments(parser, PLAIN_SHAPE)


def config_of(options: argparse.Namespace) -> AttentionConfig:
    """The config that `attention` chooses for the flags; it is not checked yet."""
    return _cases.config_of(case_of(options))


def describe(config: AttentionConfig) -> str:
    """The config in one line: head dim and dtype, and what else differs from the default."""
    words = [f"head_dim {config.head_dim}", config.dtype]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in ("head_dim", "dtype") or value == field.default:
            continue
        words.append(field.name if value is True else f"{field.name} {value}")
    return ", ".join(words)
