"""The doctor lists what is installed, where operators run (by the same rule as calls), and what is
broken.
"""

from __future__ import annotations

import json
import os

import pytest
import torch

import kernelkit
from kernelkit import __main__ as command_line
from kernelkit import doctor
from kernelkit.call import launch
from kernelkit.compile import store
from kernelkit.tune import files as tuned_files
from tests.kernelkit.tuned_writer import PLACE, entry


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """A machine without a GPU, with empty caches."""
    for name in [name for name in os.environ if name.startswith(doctor.PREFIXES)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("PTXEMU_CACHE", str(tmp_path / "emulator"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(tuned_files, "SHIPPED", tmp_path / "shipped")


def examined(capsys, code: int = 0) -> tuple[dict, str]:
    assert command_line.main(["doctor", "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert command_line.main(["doctor"]) == code
    return found, capsys.readouterr().out


def test_a_machine_without_a_gpu_is_whole(capsys):
    found, text = examined(capsys)
    assert found["gpus"] == [] == found["problems"]
    assert found["packages"]["torch"] == torch.__version__
    assert next(iter(found)) == "version"
    assert text.startswith(f"blackwell-kernels {kernelkit.__version__}\nPython ")
    assert store.VARIABLE in found["environment"]
    by_name = {row["operator"]: row["cpu"] for row in found["operators"]}
    assert by_name.keys() == doctor.OPERATORS.keys()
    assert by_name["fmha.attention"] == "emulated, sm_100a"
    assert "no CUDA GPU" in text
    assert "none: the rules choose" in text


def test_where_operators_run_is_what_a_call_is_told(monkeypatch):
    """The machine has an H100, and a GPU for which no kernel is written."""
    gpus = [{"device": f"cuda:{n}"} for n in range(2)]
    monkeypatch.setattr(doctor, "gpus", lambda: gpus)
    capabilities = {"cuda:0": (9, 0), "cuda:1": (7, 5)}
    monkeypatch.setattr(launch, "_capability", lambda device: capabilities[str(device)])
    rows = {row["operator"]: row for row in doctor.operators()}
    assert rows["gqa_lowlatency.decode"]["cuda:0"] == "native, sm_90a"
    packed = rows["moe.grouped_gemm, fused_moe with packed experts"]
    assert packed["cuda:0"].startswith("refused: cuda:0 has compute capability 9.0")
    assert all(row["cuda:1"].startswith("refused") for row in rows.values())


def test_without_the_dsl_it_says_so_and_is_whole(monkeypatch, capsys):
    real = doctor.version_of
    monkeypatch.setattr(
        doctor, "version_of", lambda name: real(name) if name != doctor.DSL else None
    )
    found, text = examined(capsys)
    assert not found["compiling"]
    assert "nothing can be compiled" in text


def test_a_missing_package_is_broken(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "version_of", lambda name: None if name == "torch" else "1.0")
    found, text = examined(capsys, code=1)
    assert found["problems"] == ["torch is missing"]
    assert "BROKEN: torch is missing" in text
    assert "GPU" not in text  # nothing could look for one


def test_tables_are_listed_with_why_they_do_not_hold(capsys):
    tuned_files.add(tuned_files.folder_of_user(), PLACE, [entry(1), entry(2)])
    found, text = examined(capsys)
    (row,) = found["tables"]
    assert row["problems"] == 2
    assert row["holds"] == "nowhere: there is no GPU"
    assert "2 problems" in text


def test_a_table_of_another_driver_is_told_apart(monkeypatch):
    from kernelkit.tune.tuner import subject

    monkeypatch.setattr(doctor, "gpus", lambda: [{"device": "cuda:0"}])
    place = tuned_files.place_of(subject("decode").tuned, PLACE.machine)
    monkeypatch.setattr(tuned_files, "machine_of", lambda _: PLACE.machine)
    assert doctor._holds(place.header(), shipped=False) == "cuda:0"
    other = place.header() | {"driver": "1.0", "gpu": "Other"}
    assert doctor._holds(other, shipped=False) == "nowhere: another gpu, another driver"
    older = place.header() | {"driver": "1.0"}
    assert doctor._holds(older, shipped=True) == "cuda:0, measured with another version of driver"


def test_damaged_files_are_broken_and_left_alone(capsys):
    path = tuned_files.add(tuned_files.folder_of_user(), PLACE, [entry(1)])
    path.write_text("{")
    kernel = store.from_environment()._kernel_path("ab" * 32)
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"half")
    found, _ = examined(capsys, code=1)
    assert len(found["problems"]) == 2
    assert path.exists()
    assert kernel.exists()


def test_a_cache_that_is_off_is_said(monkeypatch, capsys):
    monkeypatch.setenv(store.VARIABLE, "off")
    found, text = examined(capsys)
    assert found["caches"]["kernels"] is None
    assert f"off ({store.VARIABLE})" in text
