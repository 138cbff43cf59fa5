"""Decode on GPUs that only have mma.sync: the problems of the other kernels without clusters, and
the limits of such a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gqa_lowlatency import choose, decode
from gqa_lowlatency.arguments import MAX_PARTS, Arguments
from gqa_lowlatency.choose import (
    MACHINES,
    MAX_FIXED_PARTS,
    MIN_KEYS_OF_PART,
    choose_columns,
    choose_config,
    choose_num_splits,
    load_of,
)
from gqa_lowlatency.config import HEAD_DIMS, DecodeConfig
from gqa_lowlatency.launch import check_config
from gqa_lowlatency.portable import kernel
from gqa_lowlatency.portable.plan import WITHOUT_E4M3, PortablePlan
from gqa_lowlatency.shared import finish
from kernelkit.call.launch import Target
from kernelkit.plan import hw
from lab.problems.attention import PATIENCE
from lab.problems.decode import Case, verdicts
from ptxemu import Options
from ptxemu.errors import HardwareRefusal
from tests.gqa_lowlatency import cases, test_sm90
from tests.gqa_lowlatency.space import BORDERS, EDGES, FACTORS, GROUPS, case_of, work_of
from tests.gqa_lowlatency.space import SPACE as OTHERS
from tests.support.pairwise import Rule, Space, covering

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

CHECKED = Options(policy="round-robin", check=True, limit=PATIENCE)
ADVERSARIAL = Options(policy="adversarial", seed=1, limit=PATIENCE)
ADA, BLACKWELL = "sm_89", "sm_120a"
PORTABLE = sorted(arch for arch, machine in MACHINES.items() if machine.widest == 1)
SPACE = Space(
    FACTORS | {"cluster": (0, 1), "parts": (0, 3, 11), "arch": (ADA, BLACKWELL)},
    (
        *OTHERS.rules,
        Rule(("pdl", "arch"), lambda pdl, arch: not pdl or arch == BLACKWELL),
    ),
)
ROWS = covering(SPACE)
QUICK_ROWS = sorted(ROWS[:12], key=lambda row: work_of(case_of(row)))[:2]
MATRIX_ROWS = [row for row in ROWS if row not in QUICK_ROWS]


def on(rows: Sequence[dict]) -> list:
    """Parameters (arch, case) of rows."""
    return [
        pytest.param(row["arch"], case, id=f"{row['arch']}-{case}")
        for row, case in zip(rows, map(case_of, rows), strict=True)
    ]


def in_turn(chosen: Sequence[Case], parts: int = 0) -> list:
    """Parameters (arch, case), alternating between two GPUs by kernel, as one CTA or in parts."""
    archs = dict(
        zip(dict.fromkeys(case.group for case in chosen), itertools.cycle((ADA, BLACKWELL)))
    )
    found = []
    for case in chosen:
        arch, alone = archs[case.group], replace(case, cluster=1, parts=parts, tuning=())
        found.append(pytest.param(arch, alone, id=f"{arch}-{alone}"))
    return found


@pytest.mark.parametrize(("arch", "case"), on(QUICK_ROWS))
def test_every_value_of_many_factors(arch, case):
    cases.check(case, arch, CHECKED, ADVERSARIAL)


@pytest.mark.parametrize(("arch", "case"), on(MATRIX_ROWS))
def test_every_pair_of_values(arch, case):
    cases.check(case, arch, CHECKED)


@pytest.mark.parametrize(("arch", "case"), in_turn(GROUPS, parts=2))
def test_rows_of_a_kv_head(arch, case):
    cases.check(case, arch, CHECKED)


@pytest.mark.parametrize(("arch", "case"), in_turn((*BORDERS, *EDGES), parts=5))
def test_borders_of_tiles_and_edges_of_masks(arch, case):
    cases.check(case, arch, CHECKED)


FP8 = {"kv_dtype": "e4m3", "scales": "heads"}
KINDS = (
    ("sm_80", Case((300, 5, 0), (8, 2), head_dim=64, sinks=True, window=100, sink_tokens=9)),
    ("sm_80", Case((600, 40), (33, 1), head_dim=256, parts=4)),  # 8 warps; the other cases have 4
    ("sm_86", Case((600, 40), (33, 1), head_dim=256, parts=4)),
    ("sm_86", Case((300, 5, 0), (64, 1), head_dim=64, keys=16, dtype="fp16")),
    (ADA, Case((300, 5, 0), (8, 2), 3, keys=8, softcap=15.0, parts=2, **FP8)),
    (BLACKWELL, Case((2000,), (8, 1), keys=64, pdl="ready", out_dtype="fp32", **FP8)),
    ("sm_121a", Case((1500, 7), (4, 1), 2, head_dim=64, pdl="pdl")),
)


@pytest.mark.parametrize(("arch", "case"), KINDS, ids=str)
def test_what_each_gpu_has_its_own_way(arch, case):
    cases.check(case, arch, CHECKED)


MANY = Case((700, 1390, 130, 0), (8, 1), head_dim=64, sinks=True, cluster=1, parts=11)


def test_many_parts_are_added_up_together():
    """There are more parts than are read at once, and no multiple; some entries have fewer tiles,
    or none."""
    results = cases.check(MANY, ADA, CHECKED, ADVERSARIAL)
    alone = cases.check(replace(MANY, parts=1), ADA, CHECKED)
    assert not torch.equal(results[0], alone[0]), "parts make no difference, so this shows nothing"


TRAPS = {
    "no part twice": ("if first + k < all_parts:", "if first + k < all_parts + 1:"),
    "moves to the new maximum": ("            acc[n] *= old\n", "            acc[n] *= 1.0\n"),
    "waits for the others": (
        "if is_last(how, box, tables, unit, all_parts):",
        "if is_last(how, box, tables, unit, all_parts) | (place.part == 0):",
    ),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_merge_without_its_cure_is_noticed(changed, trap):
    changed(finish, [kernel], "finish", TRAPS[trap])
    with pytest.raises(AssertionError):
        cases.check(replace(MANY, amplitude=4.0), ADA, CHECKED)


def test_elements_of_q_may_be_far_apart(monkeypatch):
    """Their largest is found with another instruction than on Hopper."""
    monkeypatch.setattr(test_sm90, "ARCH", ADA)
    tensors = test_sm90.problem()
    results = test_sm90.decoded(*tensors, 1.0)
    options = {"scale": 1.0, "arch": ADA}
    cases.expect(verdicts(tensors, options, results, torch.bfloat16))
    for value in (float("inf"), float("nan"), 3e38, 2.0**-133):
        test_sm90.test_extreme_elements_of_q_stay_in_their_row(value)


def test_an_entry_does_not_know_its_batch():
    """The parts of an entry depend on its keys alone; their number does not depend on the GPU."""
    case = Case((1100, 77, 600, 0), (8, 2), 2, head_dim=64, batch_invariant=True)
    q, k, v = case.inputs()
    options = case.options() | case.launch_options(ADA) | {"max_kv_len": 1130}
    lens = options.pop("kv_lens")

    def step(*entries):
        chosen = torch.tensor(entries)
        tensors = (tensor[chosen] for tensor in (q, k, v))
        return decode(*tensors, kv_lens=lens[chosen], return_lse=True, **options)

    o, lse = step(0, 1, 2, 3)
    for entries in ((0,), (2, 1), (3, 0)):
        expected = (o[list(entries)], lse[list(entries)])
        assert cases.same_bits(step(*entries), expected), entries


# -- choices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", PORTABLE)
@pytest.mark.parametrize("sms", [0, 16, 58, 188])
def test_parts_fill_the_sms(arch, sms):
    here = sms or hw.SMS_OF[arch]
    for keys, ctas in itertools.product((0, 255, 4096, 100_000), (1, 8, 30, 64, 200)):
        parts = choose_num_splits(arch, keys, ctas, 1, sms=sms)
        assert parts == 1 or parts * ctas <= here, "more CTAs than SMs"
        assert parts == 1 or keys >= parts * MIN_KEYS_OF_PART, "shorter shares than are worth it"
        most = parts == MAX_PARTS or (parts + 1) * MIN_KEYS_OF_PART > keys
        assert most or (parts + 1) * ctas > here, "SMs without work"


@pytest.mark.parametrize(
    ("arch", "keys", "clusters", "parts"),
    [
        (ADA, 8192, 8, 16),  # 128 of 128 SMs
        (ADA, 8192, 9, 14),
        (ADA, 1024, 8, 4),  # of two tiles each
        (ADA, 8192, 65, 1),
        (ADA, 100_000, 1, 64),
        (BLACKWELL, 8192, 8, 21),  # 168 of 170
        ("sm_87", 8192, 8, 2),
        ("sm_86", 511, 1, 1),
    ],
)
def test_how_many_parts(arch, keys, clusters, parts):
    assert choose_num_splits(arch, keys, clusters, 1) == parts
    fixed = {choose_num_splits(arch, keys, n, 1, batch_invariant=True, sms=n) for n in (1, 8, 300)}
    assert fixed == {max(1, min(keys // 512, MAX_FIXED_PARTS))}


@pytest.mark.parametrize(("sms", "parts"), [(128, True), (15, False)])
def test_a_launch_takes_the_sms_of_its_gpu(sms, parts, monkeypatch):
    monkeypatch.setattr(choose, "sms_of", lambda device: sms)
    given = SimpleNamespace(
        q=SimpleNamespace(device=torch.device("cuda"), shape=(1, 8, 64)),
            k=SimpleNamespace(shape=(1, 8192, 8, 64)),
        most_seen=8192, batch_invariant=False, parts=0,
    )  # fmt: skip
    load = load_of(given, ADA)
    assert load.sms == sms
    assert load_of(given, "sm_90a").sms == 0
    assert choose.config_for(DecodeConfig(cluster=0), ADA, load).parts == parts


def chosen(arch: str, **options: bool) -> DecodeConfig:
    """Return the config for 8k keys of 8 KV heads."""
    q, k = torch.empty(1, 64, 128), torch.empty(1, 8192, 8, 128)
    inputs = (tensor.to("meta", torch.bfloat16) for tensor in (q, k, k))
    return choose_config(Arguments(*inputs, **options), Target("emulate", arch))


@pytest.mark.parametrize("arch", PORTABLE)
def test_what_is_chosen_has_no_cluster(arch):
    config = chosen(arch)
    assert (config.cluster, config.parts, config.warps, config.step) == (1, True, 0, 0)
    assert (config.alone, config.early, config.beside) == (False, False, False)
    check_config(config, arch)


def test_two_grids_share_sms_with_pdl():
    """CTAs of the next grid run on SMs that have become free, if each CTA has an SM to itself."""
    config = chosen(BLACKWELL, pdl=True, kv_ready_before_pdl=True)
    assert (config.alone, config.early) == (True, False)
    assert 2 * (PortablePlan(config, BLACKWELL).smem_bytes + 1024) > hw.smem_bytes_per_sm(BLACKWELL)


# -- what a GPU holds and lacks -------------------------------------------------------------------


@pytest.mark.parametrize("arch", PORTABLE)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_what_is_chosen_fits(arch, head_dim):
    columns = choose_columns(arch, head_dim)
    for rows, alone, kv_dtype in itertools.product(
        (*range(1, 9), 16, 32, 100), (0, 1), ("", "e4m3")
    ):
        if kv_dtype and arch in WITHOUT_E4M3:
            continue
        config = DecodeConfig(
            head_dim, group=rows, kv_dtype=kv_dtype, max_columns=columns, alone=bool(alone)
        )
        check_config(config, arch)
        plan = PortablePlan(config, arch)
        assert plan.smem_bytes <= hw.smem_bytes_per_cta(arch)
        assert plan.warps in (4, 8)
        more = PortablePlan(replace(config, warps=8), arch)
        assert plan.warps == 8 or more.smem_bytes > hw.smem_bytes_per_cta(arch)


@pytest.mark.parametrize(
    ("arch", "fields", "error", "words"),
    [
        (ADA, {"cluster": 2}, NotImplementedError, "cluster 2 on sm_89: 1"),
        (BLACKWELL, {"cluster": 8}, NotImplementedError, "cluster 8 on sm_120a: 1"),
        (ADA, {"pdl": True}, NotImplementedError, "pdl=True on sm_89"),
        ("sm_80", {"kv_dtype": "e4m3"}, NotImplementedError, "e4m3 keys on sm_80: .* 8.9"),
        ("sm_86", {"kv_dtype": "e4m3"}, NotImplementedError, "e4m3 keys on sm_86"),
        ("sm_87", {"kv_dtype": "e4m3"}, NotImplementedError, "e4m3 keys on sm_87"),
        (ADA, {"stages": 4}, ValueError, "bytes of shared memory, limit 101376"),
        ("sm_80", {"stages": 6}, ValueError, "bytes of shared memory, limit 166912"),
        (ADA, {"head_dim": 256, "warps": 8}, ValueError, "limit 101376"),
    ],
)  # fmt: skip
def test_refusals_name_value_and_limit(arch, fields, error, words, no_compile):
    if "stages" in fields:
        fields = fields | {"warps": 8}
    with pytest.raises(error, match=words):
        check_config(DecodeConfig(**fields), arch)


@pytest.mark.parametrize(("arch", "warps", "stages"), [(ADA, 4, 5), ("sm_80", 8, 4)])
def test_shared_memory_ends_where_the_check_says(arch, warps, stages, monkeypatch):
    """A further slot, 4 KB per warp, is refused here; without the check the emulator refuses it."""
    case = Case((40,), (8, 1), cluster=1, tuning=(("stages", stages), ("warps", warps)))
    cases.check(case, arch, CHECKED)
    more = replace(case, tuning=(("stages", stages + 1), ("warps", warps)))
    with pytest.raises(ValueError, match="bytes of shared memory, limit"):
        cases.run(more, arch)
    monkeypatch.setattr("gqa_lowlatency.launch.check_config", lambda config, arch: None)
    with pytest.raises(HardwareRefusal, match=f"may have {hw.smem_bytes_per_cta(arch)}"):
        cases.run(more, arch)


def test_a_call_refuses_before_it_compiles(no_compile):
    q, k = torch.zeros(1, 8, 64).bfloat16(), torch.zeros(1, 64, 1, 64)
    with pytest.raises(NotImplementedError, match="e4m3 keys on sm_86"):
        decode(q, *(k.to(torch.float8_e4m3fn),) * 2, arch="sm_86")
    with pytest.raises(NotImplementedError, match="pdl=True on sm_80"):
        decode(q, *(k.bfloat16(),) * 2, arch="sm_80", pdl=True)
