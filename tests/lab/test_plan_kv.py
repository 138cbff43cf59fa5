"""`plan.py`: its figures compared with those by hand; vLLM's layout as vLLM prints it."""

from __future__ import annotations

import json
import re

import pytest

from kvcache.layouts import presets
from kvcache.layouts.models import gqa
from kvcache.planner.capacity import Mix, plan, usage
from lab.cache_model import kv
from lab.cache_model import vllm as _kv_vllm
from lab.flags import kvcache as _kv_args
from lab.tools import groups

FLASH = _kv_vllm.vllm_layout(presets.deepseek_v4_flash())
PRO = _kv_vllm.vllm_layout(presets.deepseek_v4_pro(record="bf16", online_hca=True))
GIB, MIB = 2**30, 2**20


def test_vllm_groups_of_v4_flash_are_those_that_it_prints():
    """See issue #54703 of vLLM. The shares are those of a block that the stride adds."""
    assert [group.bytes for group in FLASH.groups] == [
        *(1_002_240, 823_680, 786_240, 870_912, 656_640)
    ]
    assert [group.tokens for group in FLASH.groups] == [256, 64, 64, 4, 8]
    shares = [round(100 * FLASH.stranded_share(group), 1) for group in FLASH.groups]
    assert shares == [0, 17.8, 21.6, 13.1, 34.5]
    assert FLASH.stride == 1_002_240
    assert FLASH.bytes_per_token == 3915
    assert FLASH.same_records.bytes_per_token == 3850.25
    hca_page = FLASH.groups[0].pages[2][1]
    assert (hca_page.payload, hca_page.bytes) == (1168, 1728)


def test_vllm_admission_reserve():
    assert FLASH.reserve(10**6) == 3354
    assert [g.reserved(10**6, 8192) for g in FLASH.groups[1:]] == [131, 131, 2051, 1041]
    assert FLASH.reserve(10**6) * FLASH.stride / GIB == pytest.approx(3.13, abs=0.005)
    assert FLASH.reserve(10**6, batches=2) * FLASH.stride / GIB == pytest.approx(6.24, abs=0.005)
    assert FLASH.steady == 26
    assert FLASH.steady * FLASH.stride / MIB == pytest.approx(24.85, abs=0.005)
    assert FLASH.reserve(100) == 25 + 13 + 2 * 2  # no more than the request has tokens for


def test_vllm_groups_of_v4_pro():
    """31 HCA layers set the width to 31: the window's 61 layers form groups of 31 and 30."""
    assert [group.bytes for group in PRO.groups] == [
        30 * (37_440 + 8_640) + 31 * 1_728,
        *(31 * 37_440, 30 * 37_440, 30 * (32_832 + 8_640), 31 * 32_832),
    ]
    assert PRO.bytes_per_token == 5609.25
    assert PRO.reserve(10**6) == 3354
    # The result does not depend on the plan's records and tails.
    assert _kv_vllm.vllm_layout(presets.deepseek_v4_pro(draft=3)) == PRO


@pytest.mark.parametrize(("tokens", "held"), [(1, 5), (8, 6), (191, 23), (1000, 28), (8192, 54)])
def test_vllm_blocks_that_the_windows_leave_behind_are_free(tokens, held):
    """A block is held while the next token's query reads one of its tokens."""
    found = 0
    for group in FLASH.groups:
        first = max(0, tokens - group.window + 1) if group.window else 0
        found += len({x // group.tokens for x in range(first, tokens)})
    assert FLASH.blocks(tokens) == found == held


@pytest.mark.parametrize("group", FLASH.groups[1:], ids=lambda group: group.name)
def test_vllm_steady_state_is_the_most_that_a_window_holds(group):
    assert max(group.blocks(tokens) for tokens in range(1, 2000)) == group.steady()


@pytest.mark.parametrize(("name", "larger_below"), [
    ("deepseek-v4-flash", 65), ("deepseek-v4-pro", 73)
])  # fmt: skip
def test_where_a_request_is_smaller_than_in_vllm(name, larger_below):
    """Compared with vLLM's records, requests of at least this length have fewer bytes here,
    stranded and in total. Below it the fixed state is larger than the blocks that vLLM allocates
    one by one."""
    peer = _kv_vllm.vllm_layout(presets.preset(name))
    ours = {tokens: usage(peer.same_records, tokens) for tokens in (*range(1, 600), 8192, 2**20)}
    larger = [tokens for tokens, held in ours.items() if held.total > peer.total(tokens)]
    assert max(larger) == larger_below - 1
    for tokens, held in ours.items():
        assert held.live == peer.live(tokens)
        difference = peer.total(tokens) - held.total
        assert peer.stranded(tokens) - held.stranded_bytes == difference


def test_vllm_requests_leave_room_to_admit_the_last_one():
    """The memory holds the blocks of all but the last request, and the last one's reserve."""
    one = FLASH.blocks(8192)
    assert one == 54
    last = 32 + FLASH.reserve(8192)
    for requests in (1, 2, 7):
        memory = FLASH.stride * (last + (requests - 1) * one)
        assert FLASH.requests(memory, 8192) == requests
        assert FLASH.requests(memory - 1, 8192) == requests - 1


def test_only_v4_has_a_layout_in_vllm_here():
    with pytest.raises(ValueError, match=r"gqa has .'k', 'v'.; DeepSeek-V4 has csa, hca and swa"):
        _kv_vllm.vllm_layout(gqa(2, 1, 64))


def test_figures_are_those_of_the_plan(written):
    flags = "--memory 100GB --weights 20GB --context 64k --checkpoints 100"
    text, (found,) = written(f"plan.py {flags}")
    layout = presets.deepseek_v4_pro()
    made = plan(layout, 80 * 10**9, Mix((65536,)), checkpoints=100, workspace=2**25)
    assert found["bytes"] == dict(made.shares)
    assert found["slots"] == {"blocks": made.blocks, "states": made.states, "checkpoints": 100}
    assert found["requests"] == made.requests
    each = made.longest(made.requests)
    words = f"{made.why}; all {made.requests:,} requests can have {each:,} tokens each\n"
    assert f"deepseek-v4-pro 584+68: {words}" in text
    assert [fit["requests"] for fit in found["fits"]] == [
        made.fit(tokens).requests for tokens in (128, 1024, 8192, 65536, 2**20)
    ]
    assert [fit["blocks"] for fit in found["fits"]] == [1, 8, 64, 512, 8192]
    for fit in found["fits"]:
        assert fit["live_bytes"] + sum(fit["stranded_bytes"].values()) == fit["total_bytes"]
    line = r"^ 64k +([\d,]+) .* ([\d,]+) +(?:states|blocks) +[\d,]+ +[\d,]+ +([\d,]+) *$"
    (shown,) = re.findall(line, text, re.MULTILINE)
    assert shown == ("512", f"{made.requests:,}", f"{made.requests:,}")
    for words in ("5,031", "5,116", "644,024", "654,912", "23,278,464", "1,435,968"):
        assert words in text
    there = found["vllm"][3]
    assert there["tokens"] == 65536
    assert there["vllm"]["stranded_bytes"] == PRO.stranded(65536)
    for row, fit in zip(found["vllm"], found["fits"], strict=True):
        ours = row["ours"]
        assert (ours["requests"], ours["divided_for_it"]) == (fit["requests"], fit["best"])


def test_several_models_a_config_and_a_picture(written, tmp_path):
    config = tmp_path / "mine" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(presets.CONFIGS["gpt-oss-120b"]), encoding="utf-8")
    picture = tmp_path / "plan.png"
    models = f"--model {config} --model deepseek-v4-flash --model llama-3.1-70b"
    flags = "--draft 2 --batch 7 --context 8k:3,100:1 --checkpoints 1% --lengths 100"
    text, found = written(f"plan.py {models} {flags} --plot {picture}")
    assert [w["layout"].split()[0] for w in found] == ["mine", "deepseek-v4-flash", "llama-3.1-70b"]
    assert [w["requests"] for w in found] == [7, 7, 7]
    assert [w["slots"]["states"] for w in found] == [7, 7, 0]
    assert found[2]["slots"]["checkpoints"] == 0 < found[0]["slots"]["checkpoints"]
    assert ["vllm" in w for w in found] == [False, True, False]
    assert found[0]["context"] == {"8192": 3, "100": 1}
    assert "divided for requests of 8k (3), 100 (1) tokens" in text
    assert text.count("vLLM's blocks of") == 1
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


def test_records_are_planned_side_by_side(written):
    text, found = written("plan.py --record fp8 --record bf16 --online-hca --mtp 1 --states 9")
    assert [round(w["bytes_per_token"]) for w in found] == [5031, 9848]
    assert [w["bytes"]["workspace"] for w in found] == [2**25, 0]
    assert [w["slots"]["states"] for w in found] == [9, 9]
    assert text.count("vLLM's blocks of") == 1  # one per model, for any records


@pytest.mark.parametrize(("parse", "text", "value"), [
    (_kv_args.memory, "141GB", 141 * 10**9),
    (_kv_args.memory, "1.5 gib", 3 * 2**29),
    (groups.positive_count, "8k", 8192),
    (groups.positive_count, "1M", 2**20),
    (_kv_args.mix, "8k:3,100", Mix((8192, 100), (3, 1))),
    (_kv_args.token_list, "8k,1k,8192", (1024, 8192)),
    (_kv_args.reserve, "5%", (0, 0.05)),
    (_kv_args.reserve, "12", (12, 0.0)),
])  # fmt: skip
def test_values_of_flags(parse, text, value):
    assert parse(text) == value


def test_numbers_in_tables():
    assert [kv.length(n) for n in (1, 1000, 1024, 1536, 2**20)] == [
        *("1", "1,000", "1k", "1,536", "1M")
    ]
    assert [kv.size(n) for n in (9_999_999, 2**25)] == ["9,999,999", "32.00 MiB"]
