"""The key of a kernel on disk: its config as text, the files that it is traced from, and whether
the loaded code is that of the files.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kernelkit.plan.hw
from fmha.config import AttentionConfig
from fmha.shared import walk
from fmha.sm100.roles import rows, softmax
from kernelkit.compile import pristine, sources
from kernelkit.compile.keys import KernelKey, NotPlain
from kernelkit.merge import plan as merge_plan
from kernelkit.merge.plan import MergeConfig
from lab.house.source import PACKAGES, ROOT
from moe.routing.config import PermutationConfig

ATTENTION = "fmha.sm100.kernel"
MERGE = MergeConfig(64, ("bf16", "fp32"), "bf16", False, True, False, capacity=4, lanes=2)
CONFIGS = [AttentionConfig(right=True), MERGE, PermutationConfig(8, 8, True), None, ("a", 1.5)]


# ---- config as text


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_key_survives_text(config):
    key = KernelKey("moe.sm100.kernel:other", config, "sm_100a")
    assert KernelKey.from_text(key.to_text()) == key
    assert "\n" not in key.to_text()


def test_different_configs_have_different_texts():
    changed = [dataclasses.replace(AttentionConfig(), head_dim=128), AttentionConfig(right=True)]
    texts = {KernelKey(ATTENTION, config, "sm_100a").to_text() for config in changed}
    texts.add(KernelKey(ATTENTION, AttentionConfig(right=True), "sm_103a").to_text())
    texts.add(KernelKey("another.source", AttentionConfig(right=True), "sm_100a").to_text())
    assert len(texts) == 4


@pytest.mark.parametrize("config", [len, (1, print), [1], {"a": 1}, object()], ids=[*"abcde"])
def test_what_has_no_lasting_text_has_no_key(config):
    with pytest.raises(NotPlain):
        KernelKey(ATTENTION, config, "sm_100a").to_text()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"source": "a", "config": {"class": "no:x"}}'])
def test_text_that_is_no_key_is_refused(text):
    with pytest.raises(ValueError):
        KernelKey.from_text(text)


@pytest.mark.parametrize("config", [
    {"class": "os:system", "fields": {"command": "exit 7"}},
    {"class": "subprocess:Popen", "fields": {"args": "true"}},
    {"class": "kernelkit.compile.aot:os.system", "fields": {"command": "exit 7"}},  # via our module
    {"class": "kernelkit.compile.aot:KernelKey.to_text", "fields": {}},
    {"class": "kernelkit.compile.aot:load", "fields": {"folder": "/"}},  # ours, but not a class
    {"class": "kernelkit.compile.aot:Path", "fields": {}},
    {"enum": "antigravity:x", "name": "y"},
    {"class": "dataclasses:make_dataclass", "fields": {"cls_name": "A", "fields": []}},
    {"class": "../../tests:x", "fields": {}},
])  # fmt: skip
def test_a_text_calls_nothing_but_configs(config, monkeypatch):
    """A record of kernels may come from anyone."""
    monkeypatch.setattr("os.system", lambda *_, **__: pytest.fail("called"))
    known = set(sys.modules)
    text = json.dumps({"source": ATTENTION, "arch": "sm_90a", "config": config})
    with pytest.raises(ValueError, match=r"not a module of|not the class of a config"):
        KernelKey.from_text(text)
    assert "antigravity" not in set(sys.modules) - known


def test_a_source_of_others_is_refused():
    text = json.dumps({"source": "subprocess:run", "arch": "sm_90a", "config": None})
    with pytest.raises(ValueError, match="subprocess is not a module of"):
        KernelKey.from_text(text)


def test_a_title_says_what_differs_from_the_defaults():
    title = KernelKey(ATTENTION, AttentionConfig(head_dim=128, softcap=True), "sm_100a").title()
    assert title == "fmha.sm100.kernel AttentionConfig(head_dim=128, softcap=True) sm_100a"


# ---- the files


def test_a_kernel_is_traced_from_what_it_reaches():
    found = set(sources.closure(ATTENTION))
    assert {
        "fmha.sm100.roles.softmax",
        "kernelkit.device.online_softmax",
        "kernelkit.plan.hw",
    } <= found
    assert not {name for name in found if name.startswith(("moe.", "ptxemu", "kvcache"))}
    assert not found & {
        "kernelkit.compile.compiler",
        "kernelkit.call.launch",
        "fmha.api",
        "fmha.launch",
    }


def test_what_a_trace_imports_was_reached(tmp_path):
    """These are all of our modules that a process has after importing a kernel, except packages and
    what packages import."""
    code = (
        "import importlib, sys; importlib.import_module(sys.argv[1]);"
        "print(*(m for m in sys.modules if m.partition('.')[0] in sys.argv[2:]))"
    )
    for root in (ATTENTION, "mla.compressor.window_kernel", "moe.sm100.kernel"):
        command = [sys.executable, "-c", code, root, *sources.PACKAGES]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        imported = {name for name in done.stdout.split() if not _is_package(name)}
        begun = {"kernelkit.call.exports", "kernelkit.call.moved"}
        assert imported <= {*sources.closure(root), *begun}


def _is_package(module: str) -> bool:
    return sources.path_of(module).name == "__init__.py"


def test_packages_are_those_that_are_installed():
    """tests/test_release.py compares `lab.house.source.PACKAGES` with pyproject.toml."""
    others = {"blackwell_engines", "cycle_model", "ptxemu"}  # without kernels
    assert {*sources.PACKAGES, *others} == {*PACKAGES, "examples"}  # which stays in the checkout


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of packages, whose files may be changed."""
    for name in ("fmha", "kernelkit", "gqa_lowlatency"):
        shutil.copytree(ROOT / name, tmp_path / name)
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    cached = (sources.fingerprint, sources.closure, sources.path_of, sources._imports)

    def clear() -> None:
        for function in cached:
            function.cache_clear()

    clear()
    yield lambda: (clear(), sources.fingerprint(ATTENTION))[1]
    monkeypatch.undo()
    clear()


@pytest.mark.parametrize(("name", "counts"), [
    ("fmha/sm100/roles/softmax.py", True), ("kernelkit/plan/hw.py", True), ("fmha/config.py", True),
    ("fmha/api.py", False), ("kernelkit/merge/kernel.py", False),
    ("gqa_lowlatency/choose.py", False),
])  # fmt: skip
def test_a_change_counts_where_it_is_reached(copy, tmp_path, name, counts):
    before, path = copy(), tmp_path / name
    path.write_text(path.read_text(encoding="utf-8") + "\n# more\n", encoding="utf-8")
    assert (copy() != before) == counts


@pytest.mark.parametrize("text", [
    "from kernelkit.merge import (  # (why)\n    api,\n    plan as merge_plan,\n)",
    "import kernelkit.merge.plan",
    "def late():\n    from kernelkit.merge.plan import (\n        MergeConfig,\n    )",
])  # fmt: skip
def test_imports_are_found_however_they_are_written(copy, tmp_path, text):
    assert "kernelkit.merge.plan" not in sources.closure(ATTENTION)
    path = tmp_path / "fmha/sm100/layout.py"
    path.write_text(path.read_text(encoding="utf-8") + f"\n{text}\n", encoding="utf-8")
    copy()
    assert "kernelkit.merge.plan" in sources.closure(ATTENTION)


# ---- what is loaded


def kernel_modules() -> list[str]:
    """Every module with a `host_function`, which `compile_once` accepts."""
    modules = []
    for package in sources.PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "def host_function" in path.read_text(encoding="utf-8"):
                modules.append(".".join(path.relative_to(ROOT).with_suffix("").parts))
    return modules


@pytest.mark.parametrize("module", kernel_modules())
def test_nothing_is_taken_for_patched_that_is_not(module):
    importlib.import_module(module)
    assert pristine.patched(module) == []


def _other(*_: object) -> None:
    pass


@pytest.mark.parametrize(("owner", "name", "value", "found"), [
    (softmax.Softmax, "run", _other, "fmha.sm100.roles.softmax.Softmax.run"),
    (softmax.Softmax, "mask", softmax.Softmax.run, "fmha.sm100.roles.softmax.Softmax.mask"),
    (softmax.Softmax, "added", _other, "fmha.sm100.roles.softmax.Softmax.added"),
    (softmax, "Softmax", type("Softmax", (), {}), "fmha.sm100.roles.softmax.Softmax"),
    (walk, "locate", _other, "fmha.shared.walk.locate"),
    (walk, "locate", walk.plan_walk, "fmha.shared.walk.locate"),
    (rows, "hw", merge_plan, "fmha.sm100.roles.rows.hw"),
    (kernelkit.plan.hw, "SMS", 3, "kernelkit.plan.hw.SMS"),
    (kernelkit.plan.hw, "TMA_ALIGN_BYTES", 16.0, "kernelkit.plan.hw.TMA_ALIGN_BYTES"),
], ids=[*"abcdefghi"])  # fmt: skip
def test_patches_are_found(monkeypatch, owner, name, value, found):
    monkeypatch.setattr(owner, name, value, raising=False)
    assert found in pristine.patched(ATTENTION)
    monkeypatch.undo()
    assert pristine.patched(ATTENTION) == []


def test_what_is_not_traced_may_be_patched(monkeypatch):
    monkeypatch.setattr(merge_plan, "MergeConfig", None)
    assert pristine.patched(ATTENTION) == []
    assert Path(merge_plan.__file__).parent.name == "merge"


def test_a_function_of_a_changed_copy_of_its_module_is_patched(changed):
    """The function's code is that of the file, but what it calls is not."""
    from moe.sm100.roles import epilogue

    changed(epilogue, [epilogue], "apply", ("setp.gt", "setp.le"))
    assert pristine.patched("moe.sm100.kernel") == ["moe.sm100.roles.epilogue.apply"]
