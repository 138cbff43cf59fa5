"""GroupedConfig -> the compiled kernel."""

from typing import Any

from kernelkit.compile import compile_once
from moe.config import GroupedConfig
from moe.sm100.kernel import GroupedGemm
from moe.sm100.signature import example_arguments


def compile_grouped(config: GroupedConfig, arch: str = "sm_100a") -> Any:
    """The compiled `GroupedGemm.__call__` of `config`; compiled once per process."""
    return compile_once(config, arch, lambda: (GroupedGemm(config), *example_arguments(config)))
