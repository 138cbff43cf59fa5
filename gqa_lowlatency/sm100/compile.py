"""DecodeConfig -> the compiled kernel."""

from typing import Any

from gqa_lowlatency.config import DecodeConfig
from gqa_lowlatency.device.signature import example_arguments
from gqa_lowlatency.sm100.kernel import DecodeSm100
from kernelkit.compile import compile_once


def compile_decode(config: DecodeConfig, arch: str = "sm_100a") -> Any:
    """The compiled `DecodeSm100.__call__` of `config`; compiled once per process."""
    return compile_once(config, arch, lambda: (DecodeSm100(config), *example_arguments(config)))
