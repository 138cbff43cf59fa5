"""DecodeConfig -> the compiled Hopper kernel."""

from typing import Any

from gqa_lowlatency.config import DecodeConfig
from gqa_lowlatency.device.signature import example_arguments
from gqa_lowlatency.sm90.kernel import DecodeSm90
from kernelkit.compile import compile_once


def compile_decode(config: DecodeConfig, arch: str = "sm_90a") -> Any:
    """The compiled `DecodeSm90.__call__` of `config`; compiled once per process."""
    return compile_once(config, arch, lambda: (DecodeSm90(config), *example_arguments(config)))
