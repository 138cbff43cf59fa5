"""cycles.py writes what it prints to its file; refusals name value and limit."""

from __future__ import annotations

import pytest

MAINLOOPS = "K,TILE_M,TILE_N,TILE_K,STAGES,dtype,time_ms"
MERGE = "merge --rows 1 --names '2 parts of head_dim 64, list'"
FLASH = "hd,causal,batch,seqlen,fa4_tflops"
FILES = {
    "empty.json": "[]",
    "broken.json": "[{",
    "others.json": '[{"gpu": {"name": "H100"}}, {"peer": "copy"}]',
    "empty.csv": "",
    "mainloops.csv": MAINLOOPS,
    "words.csv": f"{MAINLOOPS}\n1024,many,64,64,2,BF16,0.1\n",
    "flash.csv": f"{FLASH}\nmany,0,1,1024,100\n",
}
REFUSED = [
    ("gqa --clusters 0", "'0': expected a count from 1 on, 'all', or numbers such as 0,3,7"),
    ("gqa --clusters 1,-1", "'1,-1': expected a count from 1 on"),
    ("gqa --clusters 3,3", "'3,3': give each cluster only once"),
    (f"{MERGE} --clusters 0,999", "clusters=(0, 999); the grid has 1"),
    ("gqa --arch sm_80", "'sm_80' (choose from"),
    ("mla --kernel wgmma --gpu B200", "kernel 'wgmma' on sm_100a"),
    ("mla --e4m3 --operation sparse_decode", "--e4m3 and --full belong to decode"),
    ("gqa --gpu A100", "'A100' (choose from"),
    ("gqa --perturbed -1", "'-1': expected a number from 0 on"),
    ("gqa --what-if nonsense=3", "nonsense"),
    (f"{MERGE} --launch 1", "--launch 1: there were 1 launches, numbered from 0"),
    ("nothing.py:main", "nothing.py: no such file"),
    ("beside nothing.json", "No such file or directory: 'nothing.json'"),
    ("beside empty.json", "empty.json: not a file that bench.py writes: no rows"),
    ("beside broken.json", "broken.json: not a file that bench.py writes: "),
    ("beside others.json", "others.json: no times of kernels that can be modelled"),
    ("beside others.json --every 0", "'0': expected a number from 1 on"),
    ("beside others.json --perturbed -1", "'-1': expected a number from 0 on"),
    ("mainloops nothing.csv", "No such file or directory: 'nothing.csv'"),
    ("mainloops empty.csv", "empty.csv: no rows"),
    ("mainloops mainloops.csv", "mainloops.csv: no rows"),
    ("mainloops flash.csv", "flash.csv: 'dtype' is missing"),
    ("mainloops words.csv", "words.csv: {'K': '1024', 'TILE_M': 'many'"),
    ("mainloops words.csv --clock 0", "0 is not a number above 0"),
    ("mainloops words.csv --every 0", "'0': expected a number from 1 on"),
    ("published nothing.csv", "No such file or directory: 'nothing.csv'"),
    ("published empty.csv", "empty.csv: no column 'hd'"),
    ("published flash.csv", "flash.csv: {'hd': 'many'"),
]


@pytest.mark.parametrize(("words", "reason"), REFUSED)
def test_it_is_refused(run, tmp_path, monkeypatch, words, reason):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    result = run(f"cycles.py {words}")
    assert result.returncode == 2, result.stdout + result.stderr
    assert reason in result.stderr.splitlines()[-1]


def test_only_what_the_files_have(run, tmp_path, monkeypatch):
    """The error lists the groups of the file."""
    row = '{"step": "merge", "name": "x", "tokens": 1, "nbytes": 1, "peer": "merge", "us": 1.0, '
    text = f'[{{"gpu": {{"name": "H100"}}}}, {row}"cold": true}}]'
    (tmp_path / "rows.json").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    result = run("cycles.py beside rows.json --only decode")
    assert result.returncode == 2
    assert result.stderr == "refused: --only decode: the files have merge\n"


def test_what_is_printed_is_in_the_file(written):
    words = "--perturbed 2 --what-if global_latency_hbm=100"
    text, document = written(f"cycles.py {MERGE} {words}")
    (launch,), (change,) = document["launches"], document["what_if"]
    assert f"{launch['us']:.2f}" in text
    assert launch["low_us"] <= launch["us"] <= launch["high_us"]
    head = f"{document['kernel']}, cluster {document['cluster']}: {document['cycles']:,} cycles"
    assert head in text
    for name, share in document["shares"].items():
        assert f"{name} {share:.0%}" in text
    for name in ("waits", "chain", "spots"):
        for row in document[name]:
            assert f"{row['cycles']:,}" in text
    assert document["chain"]
    assert document["spots"]
    assert change["edit"] in text
    assert f"{change['change']:+.1%}" in text
    assert change["change"] < 0
