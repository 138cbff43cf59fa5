"""kernelkit.call.moved: modules by the names that they had in 0.2.0."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.util import find_spec

import pytest

from kernelkit.call.moved import MOVED, now_called
from lab.house.source import ROOT

PROGRAM = """
import fmha.sparse
from fmha.sparse.indexer import api
import kernelkit.tolerance
import integrations.vllm
import blackwell_engines.vllm, kernelkit.numerics.tolerance, mla.indexer.api

assert fmha.sparse is mla and api is mla.indexer.api
assert kernelkit.tolerance is kernelkit.numerics.tolerance
assert kernelkit.tolerance.__spec__.name == "kernelkit.numerics.tolerance"
assert integrations.vllm is blackwell_engines.vllm
"""


def test_every_old_name_leads_to_a_module_and_is_none_itself():
    for old, new in MOVED.items():
        assert find_spec(new), old
        path = ROOT.joinpath(*old.split("."))
        assert not path.with_suffix(".py").exists()
        assert old == "integrations" or not path.exists()


def test_old_names_are_the_same_modules():
    """Modules are imported in a fresh process."""
    command = [sys.executable, "-W", "error", "-W", "default::FutureWarning", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    for old in ("fmha.sparse", "kernelkit.tolerance", "integrations"):
        assert f"FutureWarning: {old} is now {MOVED[old]}; the old" in done.stderr


def test_a_name_below_a_moved_one_is_found():
    assert now_called("fmha.sparse.indexer.api") == "mla.indexer.api"
    assert now_called("kernelkit.tmem_plan") == "kernelkit.plan.tmem"
    assert now_called("kernelkit.nothing") is None


def test_what_never_was_is_still_missing():
    with pytest.raises(ModuleNotFoundError, match=r"kernelkit\.nothing"):
        importlib.import_module("kernelkit.nothing")
