"""What several scripts need: a kernel config from the command line, and its one-line name."""

from __future__ import annotations

import argparse
import dataclasses

from fmha.config import AttentionConfig


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """One option per field of AttentionConfig, with its default: --head-dim, --mask, ..."""
    group = parser.add_argument_group("config", "what the kernel is compiled for")
    for field in dataclasses.fields(AttentionConfig):
        option = "--" + field.name.replace("_", "-")
        kind = type(field.default)
        if kind is bool:
            group.add_argument(
                option, action=argparse.BooleanOptionalAction, default=field.default
            )
        else:
            group.add_argument(
                option, type=kind, default=field.default, help=f"default: {field.default}"
            )


def config_of(options: argparse.Namespace) -> AttentionConfig:
    """The config that the options spell; it is not checked yet."""
    names = [field.name for field in dataclasses.fields(AttentionConfig)]
    return AttentionConfig(**{name: getattr(options, name) for name in names})


def describe(config: AttentionConfig) -> str:
    """The config in one line: what differs from the default, and always shape, dtype and mask."""
    always = ("head_dim", "dtype", "mask")
    changed = [
        f"{field.name} {getattr(config, field.name)}"
        for field in dataclasses.fields(config)
        if field.name not in always and getattr(config, field.name) != field.default
    ]
    return ", ".join([f"head_dim {config.head_dim}", config.dtype, config.mask, *changed])
