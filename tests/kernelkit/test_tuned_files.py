"""Files of measured choices: never torn, never lost, never used for another machine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernelkit.compile import store
from kernelkit.tune import files as tuned_files
from kernelkit.tune.choices import Tuned, TunedWarning
from kernelkit.tune.files import TableError, add, choices_here, load, read
from lab.house.source import ROOT
from tests.kernelkit import tuned_writer
from tests.kernelkit.tuned_writer import PLACE, entry

KEYS = '{"keys": %d}'
CUDA = torch.device("cuda", 0)
DECODE = Tuned("decode", {"sm_90a": ["gqa_lowlatency.portable.kernel"]}, ["cluster"])


def start(folder: Path, *words: object) -> subprocess.Popen:
    command = [sys.executable, tuned_writer.__file__, folder, *words]
    return subprocess.Popen([*map(str, command)], cwd=ROOT, env={"PYTHONPATH": str(ROOT)})


def numbers(folder: Path) -> set[int]:
    return {found.problem["keys"] for found in load(folder, PLACE).values()}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A user's folder on the machine of PLACE, with one entry for the current sources."""
    monkeypatch.setenv(store.VARIABLE, str(tmp_path))
    monkeypatch.setattr(tuned_files, "machine_of", lambda _: PLACE.machine)
    monkeypatch.setattr(tuned_files, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    folder = tuned_files.folder_of_user()
    add(folder, tuned_files.place_of(DECODE, PLACE.machine), [entry(1)])
    return folder


def test_what_is_added_is_read_and_later_entries_replace_earlier_ones(tmp_path):
    add(tmp_path, PLACE, [entry(1), entry(2)])
    path = add(tmp_path, PLACE, [entry(2, cluster=4)])
    header, entries = read(path)
    assert header == PLACE.header()
    assert [found.choice["cluster"] for found in entries] == [2, 4]
    assert entries[0] == entry(1)


def test_writers_at_the_same_time_lose_nothing_and_a_killed_one_leaves_the_old_file(tmp_path):
    add(tmp_path, PLACE, [entry(0)])
    ranges = range(1, 9), range(11, 19), ("die", 30)
    writers = [start(tmp_path, *each) for each in ranges]
    codes = [writer.wait(60) for writer in writers]
    assert codes == [0, 0, -signal.SIGKILL]
    assert numbers(tmp_path) == {0, *ranges[0], *ranges[1]}
    assert [*tmp_path.glob(".new-*")], "the killed one had begun"
    add(tmp_path, PLACE, [entry(40)])  # its lock is free
    assert 40 in numbers(tmp_path)


def test_half_written_files_are_swept_when_they_are_old(tmp_path, monkeypatch):
    (tmp_path / ".new-1").write_text("half")
    add(tmp_path, PLACE, [entry(1)])
    assert (tmp_path / ".new-1").exists()
    monkeypatch.setattr(store, "_DAY", -1)
    add(tmp_path, PLACE, [entry(1)])
    assert not [*tmp_path.glob(".new-*")]


@pytest.mark.parametrize("spoil", ["truncated", "no entries", "wrong fields", "a list"])
def test_a_damaged_file_is_set_aside_and_said(tmp_path, spoil):
    path = add(tmp_path, PLACE, [entry(1)])
    content = json.loads(path.read_text())
    broken = {
        "truncated": path.read_text()[:-30],
        "no entries": json.dumps({"header": content["header"]}),
        "wrong fields": json.dumps(content | {"entries": [{"problem": {}, "candidates": []}]}),
        "a list": "[]",
    }
    path.write_text(broken[spoil])
    with pytest.raises(TableError, match="damaged"):
        read(path)
    with pytest.warns(TunedWarning, match="is damaged"):
        assert load(tmp_path, PLACE) == {}
    assert not path.exists()
    (aside,) = tmp_path.glob("*.damaged-*")
    assert aside.read_text() == broken[spoil]
    add(tmp_path, PLACE, [entry(2)])
    assert numbers(tmp_path) == {2}


OTHERS = {
    "driver": replace(PLACE, machine=replace(PLACE.machine, driver="570.2")),
    "gpu": replace(PLACE, machine=replace(PLACE.machine, gpu="Other GPU")),
    "sms": replace(PLACE, machine=replace(PLACE.machine, sms=114)),
    "arch": replace(PLACE, machine=replace(PLACE.machine, arch="sm_100a")),
    "sources": replace(PLACE, sources="cd" * 32),
    "operator": replace(PLACE, operator="attention"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_file_of_another_place_is_refused_even_under_the_name_of_this_one(tmp_path, other):
    path = add(tmp_path, OTHERS[other], [entry(1)])
    if path.name != PLACE.file_name:
        assert load(tmp_path, PLACE) == {}
    path.rename(tmp_path / PLACE.file_name)
    with pytest.warns(TunedWarning, match="is not used"):
        assert load(tmp_path, PLACE) == {}
    with pytest.warns(TunedWarning):
        add(tmp_path, PLACE, [entry(2)])
    assert numbers(tmp_path) == {2}
    assert [*tmp_path.glob("*.damaged-*")], "the other file is kept"


def test_what_holds_here_is_found(here):
    assert choices_here(DECODE, CUDA) == {KEYS % 1: {"cluster": 2}}


def test_another_driver_is_not_misled(here, monkeypatch):
    machine = replace(PLACE.machine, driver="580.1")
    monkeypatch.setattr(tuned_files, "machine_of", lambda _: machine)
    assert choices_here(DECODE, CUDA) == {}
    unknown = replace(PLACE.machine, driver="")
    with pytest.raises(ValueError, match="driver version is unknown"):
        add(here, replace(PLACE, machine=unknown), [entry(1)])
    path = here / tuned_files.place_of(DECODE, unknown).file_name
    text = next(here.glob("*.json")).read_text()
    path.write_text(text.replace("570.1", ""))
    monkeypatch.setattr(tuned_files, "machine_of", lambda _: unknown)
    assert choices_here(DECODE, CUDA) == {}


def test_other_sources_are_not_misled(here, monkeypatch):
    monkeypatch.setattr(tuned_files.sources, "fingerprint", lambda _: "changed")
    assert choices_here(DECODE, CUDA) == {}


def test_tables_of_the_package_hold_for_any_driver_and_sources_behind_those_of_the_user(
    here, monkeypatch, tmp_path
):
    shipped = tmp_path / "shipped"
    monkeypatch.setattr(tuned_files, "SHIPPED", shipped)
    place = tuned_files.place_of(DECODE, replace(PLACE.machine, driver="500.1"))
    place = replace(place, sources="of a release before")
    add(shipped, place, [entry(1, cluster=8), entry(7, cluster=8)])
    assert choices_here(DECODE, CUDA) == {KEYS % 1: {"cluster": 2}, KEYS % 7: {"cluster": 8}}
    monkeypatch.setattr(tuned_files, "machine_of", lambda _: replace(PLACE.machine, sms=114))
    assert choices_here(DECODE, CUDA) == {}
    next(shipped.glob("*.json")).write_text("{")
    monkeypatch.setattr(tuned_files, "machine_of", lambda _: PLACE.machine)
    with pytest.warns(TunedWarning, match="damaged"):
        assert choices_here(DECODE, CUDA) == {KEYS % 1: {"cluster": 2}}


def test_every_table_of_the_package_is_whole():
    for path in tuned_files.SHIPPED.glob("*.json"):
        header, entries = read(path)
        assert header["format"] == tuned_files.FORMAT
        assert path.name.startswith(header["operator"])
        assert entries


def test_without_files_of_the_operator_nothing_is_asked_of_the_device(here, monkeypatch):
    def asked(_):
        raise AssertionError("asked")

    monkeypatch.setattr(tuned_files, "machine_of", asked)
    other = Tuned("attention", {"sm_90a": ["fmha.sm90.kernel"]}, [])
    assert choices_here(other, CUDA) == {}
    monkeypatch.setenv(store.VARIABLE, "off")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choices_here(DECODE, CUDA) == {}
