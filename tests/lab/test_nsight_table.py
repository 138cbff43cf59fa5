"""nsight.py table: selected metrics of ncu's exports, in fixed units."""

from __future__ import annotations

import csv

import pytest

from lab.report.documents import read
from lab.verbs import nsight
from lab.verbs.nsight import GPU, METRICS, WORDS, in_base_units

PRIVATE = {"Process ID": "525", "Host Name": "a-host", "Process Name": "python3.12"}


@pytest.fixture
def export(tmp_path):
    """export(name, unit of the duration, metric=value): an export of one launch."""

    def call(name, unit="us", **more):
        values = {**PRIVATE, GPU: "a GPU", **dict.fromkeys((*WORDS, *METRICS), "1,024.500000"),
                  "Kernel Name": name, "Grid Size": "(8, 8, 1)"} | more  # fmt: skip
        units = {"gpu__time_duration.sum": unit, "dram__bytes_read.sum": "Mbyte"}
        path = tmp_path / f"{name}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            lines = csv.writer(file, quoting=csv.QUOTE_ALL)
            lines.writerow(values)
            lines.writerow([units.get(name, "") for name in values])
            lines.writerow(values.values())
        return path

    return call


@pytest.mark.parametrize(("value", "unit", "base"), [
    ("12.128000", "us", ("12128", "ns")),
    ("1.5", "ms", ("1500000", "ns")),
    ("33.808000", "Kbyte/block", ("33808", "byte/block")),
    ("0", "byte/block", ("0", "byte/block")),
    ("1.955806", "Ghz", ("1955806000", "hz")),
    ("8,192", "", ("8192", "")),
    ("58.496522", "%", ("58.496522", "%")),
    ("128", "register/thread", ("128", "register/thread")),
])  # fmt: skip
def test_units_are_base_units(value, unit, base):
    assert in_base_units(value, unit) == base


def test_a_row_per_launch_below_names_and_units(export, tmp_path, capsys):
    """Rows have the order of the files, and do not name the machine."""
    out = tmp_path / "slim.csv"
    files = [str(export("one")), str(export("another", "ms"))]
    flags = ["--date", "2026-11-27", "--note", "clocks free", "--out", str(out)]
    assert nsight.main(["table", *files, *flags]) == 0
    document = read("slim.csv", tmp_path)
    assert (document.gpu, document.date, document.notes) == ("a GPU", "2026-11-27", "clocks free")
    units, *launches = document.rows
    assert [each["Kernel Name"] for each in launches] == ["one", "another"]
    assert units["gpu__time_duration.sum"] == "ns"
    assert [each["gpu__time_duration.sum"] for each in launches] == ["1024500", "1024500000"]
    assert launches[0]["dram__bytes_read.sum"] == "1024500000"
    assert [*units] == [*WORDS, *METRICS]
    text = out.read_text(encoding="utf-8")
    assert not [word for word in (*PRIVATE, *PRIVATE.values(), "tmp") if word in text]
    assert nsight.main(["table", *files, *flags[:-2]]) == 0
    assert capsys.readouterr().out == text


def test_what_is_no_such_export_is_refused(export, tmp_path, capsys):
    (tmp_path / "empty.csv").touch()
    (tmp_path / "few.csv").write_text("Kernel Name,Grid Size\n,\none,1\n", encoding="utf-8")
    other = export("other", **{GPU: "another GPU"})
    for files, words in (
        ([tmp_path / "empty.csv"], "lacks Block Size"),
        ([tmp_path / "few.csv"], "lacks Block Size"),
        ([tmp_path / "none.csv"], "No such file"),
        ([export("one"), other], "not of a GPU, another GPU"),
        ([export("one"), export("odd", "fortnight")], "gpu__time_duration.sum is in fortnight and"),
    ):
        assert nsight.main(["table", *map(str, files)]) == 2
        assert words in capsys.readouterr().err
