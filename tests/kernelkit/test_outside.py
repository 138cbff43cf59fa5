"""Files from outside are bounded, and errors name the file and the field."""

from __future__ import annotations

import os

import pytest

from kernelkit.compile.outside import FileError, json_file, json_of, read_bounded, require_fields


def test_a_file_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bounded(path, 5) == b"12345"
    with pytest.raises(FileError, match=f"{path} has more than 4 bytes"):
        read_bounded(path, 4)


def test_a_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert read_bounded(tmp_path / "pipe") == b""


@pytest.mark.parametrize("text", [
    *("", "{", "nul", '{"a": 1, "a": 2}', '{"b": {"a": 1, "a": 1}}', "[" * 100_000),
    *("1" * 5_000, b"\xff\xff", '"\\ud8'),
])  # fmt: skip
def test_what_is_not_json_is_named(text):
    with pytest.raises(FileError, match=r"config\.json is not JSON"):
        json_of(text, "config.json")


def test_an_object_is_expected(tmp_path):
    (tmp_path / "file").write_text("[1]")
    with pytest.raises(FileError, match="holds a JSON list, expected an object"):
        json_file(tmp_path / "file")


@pytest.mark.parametrize(("item", "words"), [
    ({"a": 1}, "b is None, expected str"),
    ({"a": "1", "b": ""}, "a is '1', expected int or float"),
    ({"a": True, "b": ""}, "a is True, expected int or float"),
    ([1], "expected an object"),
])  # fmt: skip
def test_a_field_of_another_type_is_named(item, words):
    fields = {"a": (int, float), "b": str}
    require_fields("file", {"a": 1.5, "b": ""}, fields)
    with pytest.raises(FileError, match=f"^file.*{words}"):
        require_fields("file", item, fields)
