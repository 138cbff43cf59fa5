"""A command refuses what it cannot do in one line, with the value and the limit."""

from __future__ import annotations

import pytest

REFUSED = [
    # names
    ("explain.py attentions --causal", "'attentions' is not one of fmha, gqa, mla, moe"),
    # attention
    ("explain.py --head-dim 256 --schedule pingpong", "columns of 512"),
    ("dump.py --k-stages 99", "limit 232448"),
    ("emulate.py --head-dim 63", "head_dim 63"),
    ("emulate.py --rope-dim 3", "3 is not an even number"),
    ("run.py fmha --head-dim 63", "head_dim 63"),
    ("run.py fmha --batch 99999999999999999999", "within +-2147483647"),
    ("run.py gqa --tolerance nan", "nan is not a number above 0"),
    ("run.py fmha --k-stages 99", "limit 232448"),
    ("bench.py fmha --shape 1,8,8,3,2", "3 query heads: a multiple of 2"),
    ("bench.py fmha --shape 1,8,0,2,2", "sizes are at least 1"),
    ("bench.py fmha --shape 1,8,8", "'1,8,8' is not B,Sq,Skv,Hq,Hkv"),
    ("bench.py fmha --rounds 0", "'0': expected a number from 1 on"),
    ("bench.py fmha --arch sm_75", "'sm_75'"),
    ("bench.py fmha --markdown", "--markdown without --show"),
    ("bench.py fmha --no-timing --no-static", "--no-timing with --no-static"),
    ("bench.py fmha --head-dim 96 --mask full causal", "--head-dim 96 --mask full causal: no"),
    ("bench.py fmha --show results/fmha_h200.json --head-dim 64", "--show with --head-dim"),
    ("bench.py fmha --show results/none.json", "No such file or directory: 'results/none.json'"),
    ("soak.py fmha --backend emulate --graphs", "want a GPU"),
    ("soak.py fmha --backend emulate --streams", "want a GPU"),
    ("soak.py fmha --backend emulate --configs 1 --json README.md/soak.json", "'README.md'"),
    ("soak.py fmha --problem 3", "'3' is not K.N"),
    ("soak.py fmha --small --long", "not allowed with"),
    ("soak.py fmha --configs 0", "expected a number from 1 on"),
    ("soak.py moe --backend emulate --graphs", "want a GPU"),
    ("soak.py moe --small --large", "not allowed with"),
    ("soak.py gqa --small --long", "not allowed with"),
    # decode
    ("run.py gqa --head-dim 96", "head_dim 96"),
    ("run.py gqa --cluster 3", "cluster 3"),
    ("explain.py gqa --head-dim 96", "head_dim 96: supported are (64, 128, 256, 512)"),
    ("explain.py gqa --cluster 3", "refused: cluster 3"),
    ("explain.py gqa --batch 3 --kv-len 5,6", "one length, or as many"),
    ("explain.py gqa --sink-tokens 4", "without a left window"),
    ("explain.py gqa --page-size 0 --kv-ready-before-pdl", "without pdl"),
    ("explain.py gqa --arch sm_90a --stages 1", "stages 1: at least 2"),
    ("explain.py gqa --arch sm_90a --head-dim 256 --q-heads 128 --max-columns 64",
     "64 columns of head_dim 256"),
    ("explain.py gqa --head-dim 64 --kv-dtype e4m3 --page-size 1",
     "page_size 1 on sm_100a with 64 bytes"),
    ("explain.py gqa --stages 9", "bytes of shared memory"),
    ("explain.py gqa --arch sm_89 --cluster 2", "cluster 2 on sm_89"),
    ("run.py gqa --arch sm_86 --kv-dtype e4m3", "e4m3 keys on sm_86"),
    ("explain.py gqa --kv-heads 40000 --q-heads 6400000", "limit 65535 (grid dimension)"),
    ("explain.py gqa --scales", "only e4m3 is scaled"),
    ("explain.py gqa --parts 65", "65 parts: from 1 to 64"),
    ("dump.py gqa --head-dim 96", "refused: head_dim 96: supported are (64, 128, 256, 512)"),
    ("bench.py gqa --q-heads 12 --kv-heads 8", "12 query heads"),
    ("bench.py gqa --tune cluster=8,wraps=4", "'wraps=4': expected a number for one of cluster, "),
    ("bench.py gqa --tune cluster=8,warps=x", "'warps=x': expected a number for one of cluster, "),
    # experts
    ("run.py moe --hidden 100", "K = 100 in nvfp4: a positive multiple of 16"),
    ("run.py moe --intermediate 96 --granularity 64", "N = 192: a multiple of 128"),
    ("run.py moe --top-k 7", "--top-k 7: 6 experts"),
    ("run.py moe --experts 0", "--experts 0: at least 1"),
    ("run.py moe --tokens -1", "--tokens -1: at least 0"),
    ("run.py moe --format mxfp8 --h-scale 3", "--h-scale 3.0: mxfp8 has no global scale"),
    ("run.py moe --tile-rows 100", "tile_rows 100: supported are (8, 16, 32, 64, 128, 256)"),
    ("run.py moe --tile-rows 8", "tile_rows 8: an expert may have 9 rows"),
    ("run.py moe --backend cuda", "no GPU of compute capability 10.x here"),
    ("explain.py moe --tile-rows 16 --tokens 17", "tile_rows 16: an expert may have 17 rows"),
    ("explain.py moe --hidden 72", "K = 72 in nvfp4"),
    ("explain.py moe --tokens 600 --carry --tile-rows 128", "carry with granularity 32"),
    ("explain.py moe --tile-n 64", "tile_n 64: supported are (128, 256)"),
    ("explain.py moe --format mxfp4 --x-scale token", "mxfp4 has no global scale"),
    ("dump.py moe --hidden 100", "refused: K = 100 in nvfp4: a positive multiple of 16"),
    # steps
    ("run.py append --names nothing", "no problem of append has one of ['nothing'] in its name"),
    ("run.py host", "host needs a GPU and its bus"),
    # the cache
    ("run.py kvcache --model nonsense", "'nonsense' is neither a file nor one of deepseek-v4-pro"),
    ("run.py kvcache --layers 0", "--layers 0"),
    ("run.py kvcache --model deepseek-v4.1-flash", "no kernel writes any of its streams yet"),
    ("run.py kvcache --model deepseek-v4-pro --block-tokens 100",
     "does not divide a block of 100"),
    ("run.py kvcache --head-dim 96", "head_dim 96"),
    ("run.py kvcache --backend cuda", "no GPU of compute capability 9.0 or 10.x here"),
    ("bench.py kvcache-host --blocks 100 --batches 100",
     "refused: batches [100]: from 1 to fewer than --blocks 100"),
    # Q8_0
    ("run.py q8_0 --shapes 8x40", "cols 40: a multiple of 32"),
    ("run.py q8_0 --shapes 8", "'8': expected rows and columns, such as 8192x2048"),
    ("run.py q8_0 --backend cuda", "no GPU of compute capability 9.0 or 10.x or 8.x or 12.x"),
    ("explain.py q8_0 --operations product --tokens 3", "a product needs more than 16"),
    ("dump.py q8_0 --shapes 0x64", "'0': expected a number from 1 on"),
    # a layer of DeepSeek-V4
    ("run.py dsv4 --heads 3", "3 heads in 2 groups"),
    ("run.py dsv4 --steps 0", "--steps 0: at least 1"),
    ("run.py dsv4 --draft -1", "--draft -1"),
    ("run.py dsv4 --choices 9", "9 choices of 6 experts"),
    # a plan
    ("plan.py --model deepseek-v5",
     "refused: 'deepseek-v5' is neither a file nor one of deepseek-v4-pro"),
    ("plan.py --record fp4", "refused: deepseek-v4-pro: record 'fp4', one of ('fp8', "),
    ("plan.py --block-tokens 64",
     "refused: hca: one entry for 128 tokens does not divide a block of 64"),
    ("plan.py --mtp 2", "mtp 2, the model has 0 to 1 draft layers"),
    ("plan.py --memory 1GB --weights 2GB",
     "--weights 2,000,000,000 bytes leave nothing of --memory 1,"),
    ("plan.py --memory 1GB --context 1M",
     "no request of 1,048,576 tokens fits: it needs 5,388,"),
    ("plan.py --memory 80", "'80': expected a number with a unit"),
    ("plan.py --context 8q", "'8q': expected a number from 0 on"),
    ("plan.py --context 0", "'0': expected a number from 1 on"),
    ("plan.py --context 8k:0", "'8k:0': expected a weight from 1 on"),
    ("plan.py --checkpoints 100%", "'100%': expected a number from 0 on, or a share below 100%"),
    ("plan.py --checkpoints -1", "'-1'"),
    ("plan.py --draft many", "'many': expected a number from 0 on"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "words"), REFUSED)
def test_refusals_are_one_line_with_value_and_limit(run, command, words):
    result = run(command)
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stdout == ""
    *usage, reason = result.stderr.splitlines()
    assert words in reason
    assert not (usage and reason.startswith("refused: "))


@pytest.mark.parametrize("command", [
    "bench.py fmha", "bench.py gqa", "bench.py moe", "bench.py emulator", "bench.py kvcache-host",
    "bench.py kvcache-tier", "bench.py units",
])  # fmt: skip
@pytest.mark.parametrize("text", ["", "no JSON", "[]", "[3]", '{"a": 1}', '[{}, {"kind": "time"}]'])
def test_a_file_of_something_else_is_not_shown(run, tmp_path, command, text):
    file = tmp_path / "file.json"
    file.write_text(text, encoding="utf-8")
    result = run(f"{command} --show", file)
    assert result.returncode == 2
    assert result.stderr.startswith(f"refused: {file}: no")
    assert len(result.stderr.splitlines()) == 1
