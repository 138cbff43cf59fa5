"""run.py kvcache: what it prints and writes, its exit codes, what it leaves out, where it runs."""

from __future__ import annotations

import json

import pytest

from workbench.cases import kvcache_model as _kvcache_model
from workbench.commands import RUN
from workbench.flags import kvcache as _kv_args
from workbench.run import kvcache as _run_kvcache

SMALL = "--layers 1 --kv-heads 1 --block-tokens 16 --steps 0 --arch sm_90a"


def ran(monkeypatch, capsys, flags: str, *more: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "140")
    code = RUN["kvcache"].main("", [*flags.split(), *map(str, more)])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("watched", ["", "--canary --check"])
def test_a_bit_of_everything(monkeypatch, capsys, tmp_path, watched):
    report = tmp_path / "life.json"
    flags = f"{SMALL} --draft 2 --events {watched} --json"
    code, out, _ = ran(monkeypatch, capsys, flags, report)
    assert code == 0, out
    assert "every entry is the reference's, byte for byte" in out
    assert "attention is within tolerance" in out
    assert "BlockStored" in out
    written = json.loads(report.read_text())
    assert written["ok"]
    assert not watched or written["checks"]["errors"] == 0
    rows = {row["what"]: row for row in written["rows"]}
    assert rows["admit B, 43 tokens"]["hit"] == rows["admit D, 43 tokens"]["hit"] == 32
    assert rows["a token for each, behind the fork"]["copies"] == 1
    assert rows["offload B"]["copies"] == 3
    assert rows["fetch B"]["copies"] == 1  # two blocks are still there
    assert rows["offload B"]["moved"] == 3 * 16 * 2 * 128
    assert {"a step of B: NotResident", "a request for everything: PoolExhausted"} < set(rows)
    assert all(row["entries"] and not row["wrong"] for row in rows.values())
    assert 0 < rows["a token for each, at the end"]["of_limit"] <= 1
    assert written["counters"]["blocks_copied_on_write"] == 1
    assert written["metrics"]["requests"] == 3


def test_a_wrong_byte_is_a_failure(monkeypatch, capsys):
    before = _kvcache_model.Model.write

    def write(self, step):
        tables = before(self, step)
        self.cache.rows("k", 0).data()[step.requests[0].blocks[0], 1, 5] ^= 1
        return tables

    monkeypatch.setattr(_kvcache_model.Model, "write", write)
    monkeypatch.setattr(_kvcache_model.Model, "attend", lambda *_: [])
    code, out, _ = ran(monkeypatch, capsys, SMALL)
    assert code == 1
    assert "wrong bytes" in out
    assert "no attention here" in out


def test_out_of_tolerance_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(_run_kvcache, "MOST_FULL", 1e-6)
    monkeypatch.setattr(_run_kvcache, "story", lambda life, _: [(life.admit, ("A", [1, 2], 9))])
    code, out, _ = ran(monkeypatch, capsys, SMALL)
    assert code == 1
    assert "attention is out of tolerance" in out


@pytest.mark.parametrize(
    "flags",
    [
        "--model deepseek-v4-flash --record bf16 --layers 1 --canary",
        "--model deepseek-v4-flash --layers 1 --draft 3 --canary",
        "--model gpt-oss-120b --layers 1",
        "--window 16 --draft 1 --check --canary",
    ],
)
def test_models(monkeypatch, capsys, flags):
    code, out, _ = ran(monkeypatch, capsys, flags + " --steps 1")
    assert code == 0, out
    assert "attention is within tolerance" in out


def test_what_no_kernel_writes_is_named():
    layout, left = _kvcache_model.reduced(_kv_args.layout("deepseek-v4-pro", "fp8"), 2)
    assert left == ["csa_tail", "index_tail", "hca_tail", "index"]
    assert [stream.name for stream in layout.streams] == ["csa", "hca"]
    assert {array.copies for array in (*layout.streams, *layout.rings)} == {2}


@pytest.mark.parametrize(("flags", "words"), [
    ("--model nonsense", "'nonsense': neither a file nor one of deepseek-v4-pro"),
    ("--layers 0", "--layers 0"),
    ("--model deepseek-v4.1-flash", "no kernel writes any of its streams yet"),
    ("--model deepseek-v4-pro --block-tokens 100", "does not divide a block of 100"),
    ("--head-dim 96", "head_dim 96"),
    ("--backend cuda", "no GPU of compute capability 9.0 or 10.x here"),
])  # fmt: skip
def test_refusals_name_value_and_limit(monkeypatch, capsys, flags, words):
    code, out, err = ran(monkeypatch, capsys, flags)
    assert (code, out) == (2, "")
    assert err.startswith("refused: ")
    assert words in err
