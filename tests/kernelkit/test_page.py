"""docs/compiled_kernels.md tells the truth: its Python runs, its commands and variables exist."""

from __future__ import annotations

import re

from kernelkit import __main__ as command_line
from kernelkit import aot, store
from kernelkit.compile import collecting
from workbench.house.source import ROOT

PAGE = (ROOT / "docs/compiled_kernels.md").read_text(encoding="utf-8")


def test_python_of_the_page_runs():
    """And names kernels; that they compile is other tests' business."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    with collecting() as keys:
        exec(program, {})
    assert keys


def test_commands_of_the_page_exist():
    help_text = command_line._parser().format_help()
    for command in re.findall(r"python -m kernelkit (\w+)", PAGE):
        assert command in help_text


def test_variables_of_the_page_exist():
    known = {store.VARIABLE, store.LIMIT_VARIABLE, aot.VARIABLE, aot.RECORD_VARIABLE}
    assert set(re.findall(r"BLACKWELL_KERNELS_\w+", PAGE)) == known
    assert f"`{store.LIMIT_VARIABLE}` ({store.DEFAULT_LIMIT})" in PAGE
