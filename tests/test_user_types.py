"""Messages of mypy and pyright for a user's file: wrong names and types of arguments, and the types
of results.

mypy uses the settings and the cache of `make lint`, so it takes a second after that.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mypy import api

from lab.house.source import ROOT

HEAD = """
import torch

import fmha
import gqa_lowlatency
import kvcache
import moe
import ptxemu
import q8_0

def use(
    x: torch.Tensor, flag: bool, rows: kvcache.Rows, packed: moe.PackedExperts,
    router: moe.Router, blocks: moe.Quantized, weights: q8_0.Weights,
) -> None:
"""
OUT = "Tensor"
LSE = "tuple[Tensor, Tensor]"
RAW = "tuple[Tensor, Tensor, Tensor]"
TYPES = {
    "fmha.attention(x, x, x, causal=True, window=(3, 0), scale=1)": OUT,
    "fmha.attention(x, x, x, return_lse=False, normalize=True)": OUT,
    "fmha.attention(x, x, x, k_scale=x, return_lse=True)": LSE,
    "fmha.attention(x, x, x, normalize=False)": RAW,
    "fmha.attention(x, x, x, normalize=False, return_lse=flag)": RAW,
    "fmha.attention(x, x, x, return_lse=flag)": f"{OUT} | {LSE} | {RAW}",
    "gqa_lowlatency.decode(x, x, x, kv_lens=x, config=None)": OUT,
    "gqa_lowlatency.decode(x, x, x, return_lse=True)": LSE,
    "gqa_lowlatency.decode(x, x, x, return_lse=flag)": f"{OUT} | {LSE}",
    "fmha.merge([(x, x)])": LSE,
    "fmha.merge([(x, x)], sinks=x, return_lse=False)": OUT,
    "fmha.merge([(x, x)], return_lse=flag)": f"{OUT} | {LSE}",
    "moe.grouped_gemm(blocks, blocks, x)": OUT,
    "moe.grouped_gemm(blocks, blocks, x, out=torch.float16)": OUT,
    "moe.grouped_gemm(blocks, blocks, x, out='mxfp8', carry=flag)": "Quantized",
    "moe.grouped_gemm_swiglu(blocks, blocks, x, granularity=8)": OUT,
    "moe.grouped_gemm_swiglu(blocks, blocks, x, out='nvfp4')": "Quantized",
    "moe.grouped_gemm_plan(blocks, blocks, x)()": OUT,
    "moe.grouped_gemm_plan(blocks, blocks, x, out='nvfp4').result": "Quantized",
    "moe.fused_moe(x, packed, x, router, tile_rows=None)": OUT,
    "moe.fused_moe_plan(x, packed, x, router)()": OUT,
    "q8_0.matvec(weights, x, out_dtype=torch.float32)": OUT,
    "kvcache.append_rows((rows, x), None, x)": "None",
    "kvcache.gather(rows, x, x)": "None",
    "fmha.__version__": "str",
    "ptxemu.Options(check=True)": "Options",
    "kvcache.page_table(x, x, x, 16, max_pages=4)": LSE,
    "kvcache.page_slots(x, x, 16, entries=x)": OUT,
}
WRONG = [
    "fmha.attention(x, x, x, casual=True)",
    "fmha.attention(x, x, x, return_lse=True, normalise=True)",
    "fmha.attention(x, x, x, kv_lens=[1, 2])",
    "fmha.attention(x, x)",
    "o, lse = fmha.attention(x, x, x, normalize=False)",
    "o, lse, row_max = fmha.attention(x, x, x, return_lse=True)",
    "fmha.attention_plan(x, x, x, out=x)",
    "fmha.warmup(x, x, x, batches=[1], lengths=[1], caus=True)",
    "gqa_lowlatency.decode(x, x, x, normalize=False)",
    "gqa_lowlatency.decode(x, x, x, kv_lens=3)",
    "gqa_lowlatency.decode(x, x, x, return_lse='yes')",
    "o, lse, more = gqa_lowlatency.decode(x, x, x, return_lse=True)",
    "gqa_lowlatency.decode_plan(x, x, x, kv_len=x)",
    "gqa_lowlatency.warmup(x, x, x, batches=[1], lengths=[1], parts='all')",
    "fmha.merge([(x, x)], out_dtyp=torch.float32)",
    "o, lse, more = fmha.merge([(x, x)])",
    "moe.grouped_gemm(blocks, blocks, x, out='mxfp8').sum()",
    "moe.grouped_gemm(blocks, blocks, x, tile_row=8)",
    "moe.grouped_gemm_swiglu(blocks, blocks, x, carry='no')",
    "moe.grouped_gemm_plan(blocks, blocks, x, tile_rows='8')",
    "moe.fused_moe(x, packed, x, router, tile_row=8)",
    "moe.fused_moe(x, x, x, router)",
    "moe.fused_moe_plan(x, packed, x, router, activation='silu')",
    "moe.warmup(x, packed, x, router, tokens=[1], back='none')",
    "moe.ExpertWeights(packed).forward(x, x, router, experts=packed)",
    "kvcache.append_rows((x, rows), None, x)",
    "kvcache.append_rows((rows, x), None, x, bakend='auto')",
    "kvcache.gather(rows, x, [x])",
    "kvcache.gather(rows, x, x, into=x)",
    "fmha.attentoin(x, x, x)",
    "kvcache.Cach",
    "ptxemu.Option(check=True)",
]


def mypy(path: Path) -> Iterator[tuple[int, str]]:
    settings = ["--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary"]
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(ROOT)  # whose packages it then sees, and whose cache
        found, failed, _ = api.run([*settings, str(path)])
    assert not failed
    for number, words in re.findall(r"user\.py:(\d+): (.*)", found):
        yield int(number), words


def pyright(path: Path) -> Iterator[tuple[int, str]]:
    command = shutil.which("pyright")
    if command is None:
        pytest.skip("pyright is not installed: pip install 'pyright[nodejs]'")
    config = {"extraPaths": [str(ROOT)], "typeCheckingMode": "standard"}
    path.with_name("pyrightconfig.json").write_text(json.dumps(config), encoding="utf-8")
    run = [command, "--outputjson", "--pythonpath", sys.executable, path.name]
    done = subprocess.run(run, cwd=path.parent, capture_output=True, text=True, timeout=300)
    for found in json.loads(done.stdout)["generalDiagnostics"]:
        yield found["range"]["start"]["line"] + 1, f"{found['severity']}: {found['message']}"


@pytest.fixture(scope="module", params=[mypy, pyright], ids=lambda checker: checker.__name__)
def said(request, tmp_path_factory) -> dict[str, list[str]]:
    """Map each line of the user's file to a type checker's messages."""
    lines = [*(f"reveal_type({call})" for call in TYPES), *WRONG]
    path = tmp_path_factory.mktemp("user") / "user.py"
    path.write_text(HEAD + "".join(f"    {line}\n" for line in lines), encoding="utf-8")
    text: dict[str, list[str]] = {line: [] for line in lines}
    before = HEAD.count("\n")
    for number, words in request.param(path):
        text[lines[number - before - 1]].append(words)
    return text


@pytest.mark.parametrize("call", TYPES)
def test_type_of_a_result(call, said):
    (words,) = said[f"reveal_type({call})"]
    (found,) = re.findall(r'(?:Revealed type| )is "([^"]*)"$', words)
    assert re.sub(r"\w+\.", "", found) == TYPES[call]


@pytest.mark.parametrize("line", WRONG)
def test_what_is_wrong_is_an_error_in_its_line(line, said):
    assert any(words.startswith("error: ") for words in said[line])
