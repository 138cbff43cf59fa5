"""Parameters from measured rows: rules, the table of an H200, and the model that loads it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest

from cycle_model import gpus
from cycle_model.parameters.parameter import read
from lab.bringup import rates
from lab.house.source import ROOT
from lab.silicon.units import rules
from lab.silicon.units.benchmarks import benchmarks_of
from lab.silicon.units.flags import GROUPS
from lab.silicon.units.rules import (
    RULES,
    UNRULED,
    Figure,
    Missing,
    Rows,
    Rule,
    constant,
    gpu_of,
    mean,
    not_negative,
    row,
    slope,
    table_of,
)
from lab.tools.common import read_rows

H200 = ROOT / "results" / "units_h200.json"
PARAMETERS = ROOT / "cycle_model" / "parameters"
SHIPPED = PARAMETERS / "h200.json"


def _row(benchmark: str, value: float, spread: float = 0.0, **variant: object) -> dict:
    return {"benchmark": benchmark, "variant": variant, "value": value, "low": value - spread,
            "high": value + spread}  # fmt: skip


# -- arithmetic and rules -------------------------------------------------------------------------

ROWS = Rows([
    {"kind": "setting"},
    _row("a", 10, 1, n=1), _row("a", 30, 2, n=5), _row("a", 4, n=9, more=True), _row("b", 7),
    {"benchmark": "c", "variant": {}, "error": "CUDA_ERROR_X"},
])  # fmt: skip


def test_sums_and_quotients_have_the_range_of_both():
    one, five = row("a", n=1), row("a", n=5)
    assert (five - one).of(ROWS) == Figure(20, 17, 23)
    assert (five + one).of(ROWS) == Figure(40, 37, 43)
    assert (five * one).of(ROWS) == Figure(300, 28 * 9, 32 * 11)
    assert (constant(60) / five).of(ROWS) == Figure(2, 60 / 32, 60 / 28)
    assert slope("a", "n", 1, 5).of(ROWS) == Figure(5, 17 / 4, 23 / 4)
    assert mean(five, one).of(ROWS) == Figure(20, 18.5, 21.5)
    assert not_negative(one - five).of(ROWS) == Figure(0, 0, 0)
    assert ((five - one) / 2.0).words == "(a (n 5) - a (n 1)) / 2"


def test_a_row_is_named_by_enough_of_its_variant():
    assert row("a", n=9, more=True).of(ROWS).value == 4
    with pytest.raises(Missing, match=r"no row of a \(n 9\)"):
        row("a", n=9, more=None).of(ROWS)
    with pytest.raises(ValueError, match="3 rows of a: a rule has to name one"):
        row("a").of(ROWS)
    with pytest.raises(Missing, match="c: CUDA_ERROR_X"):
        row("c").of(ROWS)
    assert ROWS.has("b")
    assert not ROWS.has("c")


def test_a_rule_rounds_and_keeps_what_it_may_be():
    assert Rule(row("b")).figure(ROWS) == Figure(7, 7, 7)
    assert Rule(row("b"), below=2, above=3).figure(ROWS) == Figure(7, 5, 10)
    assert Rule(row("b"), also=(row("a", n=1),)).figure(ROWS) == Figure(7, 7, 10)
    assert Rule(row("a", n=5), step=20).figure(ROWS) == Figure(40, 20, 40)
    assert Rule(row("b") / 100.0, step=0.05).figure(ROWS) == Figure(0.05, 0.05, 0.1)
    almost = Rule(constant(0.9998), also=(constant(1.02),))
    assert almost.figure(ROWS) == Figure(1, 1, 1)
    with pytest.raises(Missing, match="no row of touch"):
        Rule(row("b"), needs=("touch",)).figure(ROWS)


def test_every_parameter_has_a_rule_or_a_reason():
    assert not set(RULES) & set(UNRULED)
    for gpu in gpus.GPUS.values():
        assert set(RULES) | set(UNRULED) == set(gpu.parameters)


# -- tables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", [gpus.H100, gpus.H200], ids=lambda gpu: gpu.name)
def test_the_shipped_tables_are_what_rows_give(gpu):
    """The command is `python -m lab.bringup.rates results/units_h200.json --json`."""
    rows, shipped = (
        folder / f"{stem}{gpu.name.lower()}.json"
        for folder, stem in ((H200.parent, "units_"), (PARAMETERS, ""))
    )
    made = table_of(read_rows(rows), rows.name)
    assert made.document() == json.loads(shipped.read_text())
    assert read(shipped) == made
    assert len(made.parameters) > 50
    others = gpus._IN_GRAPHS_OF_TORCH[gpu.name]
    assert (made.parameters | others).items() <= gpu.parameters.items()


def test_numbers_of_the_hopper_gpus():
    assert gpus.H100.value("l2_bytes_in_all") < gpus.H200.value("l2_bytes_in_all")
    assert [gpus.H200.value(name) for name in ("issue_special", "tma_latency_l2", "tma_row")] == [
        8, 270, 1.19,
    ]  # fmt: skip


def test_what_is_missing_is_kept_and_says_why():
    rows = [each for each in read_rows(H200) if each.get("variant", {}).get("instruction") != "ex2"]
    made = table_of(rows, "rows.json")
    assert "issue_special" not in made.parameters
    assert made.kept["issue_special"].startswith("no row of issue (instruction ex2")
    assert made.kept["tma_issue"].startswith("kernels on H200 were judged with")
    assert made.over(gpus.named("H200")).value("issue_special") == 8


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NVIDIA B200", "is of 'NVIDIA H200', an H200, not of"),
        ("NVIDIA A100", "no parameters of 'NVIDIA A"),
    ],
)
def test_rows_of_another_gpu_are_refused(name, words):
    with pytest.raises(ValueError, match=words):
        table_of(read_rows(H200), H200.name, name)


def test_a_gpu_has_to_be_named_somewhere():
    with pytest.raises(ValueError, match="which GPU"):
        table_of([_row("b", 1)], "rows.json")
    unknown = [{"kind": "setting", "device": {"name": "NVIDIA B300"}}]
    with pytest.raises(ValueError, match="no parameters of 'NVIDIA B300'"):
        table_of(unknown, "rows.json")
    assert table_of(unknown, "rows.json", "GB300").gpu == "GB300"
    assert gpu_of("NVIDIA H100 80GB HBM3") is gpus.H100


def test_a_table_that_is_none_is_refused_by_name(tmp_path):
    document = json.loads(SHIPPED.read_text())
    path = tmp_path / "table.json"

    def refused(words: str, **changes: object) -> None:
        path.write_text(json.dumps({**document, **changes}))
        with pytest.raises(ValueError, match=words):
            read(path).over(gpus.H200)

    one = document["parameters"]["issue_fma"]
    refused("in format 1", format=2)
    refused("no parameter 'issue_fmma'", parameters={"issue_fmma": one})
    refused("issue_fma must have", parameters={"issue_fma": {"value": 1}})
    refused("issue_fma: .*not within", parameters={"issue_fma": {**one, "low": 3}})
    refused("issue_fma in 'us'", parameters={"issue_fma": {**one, "unit": "us"}})
    path.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        read(path)


def test_the_command_says_what_differs(tmp_path, capsys):
    rows = read_rows(H200)
    for each in rows[1:]:
        if each["variant"] == {"instruction": "ex2", "sass": "MUFU.EX2"}:
            each |= {"value": 18.0, "low": 18.0, "high": 18.0}
        if each["benchmark"] == "global_latency_l1":
            each |= {"value": 50.0, "low": 50.0, "high": 50.0}
    path, out = tmp_path / "rows.json", tmp_path / "table.json"
    path.write_text(json.dumps(rows))
    assert rates.main([str(path), "--json", str(out)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "latency_special 18 18 .. 19 17, measured within its range" in text
    assert "global_latency_l1 50 50 .. 52 32, measured outside its range" in text
    assert read(out).parameters["latency_special"].value == 18
    assert rates.main([str(path), "--gpu", "NVIDIA B200"]) == 2
    assert rates.main([str(tmp_path / "none.json")]) == 2


# -- the model with a table -----------------------------------------------------------------------


def test_cycles_takes_a_table(tmp_path):
    from argparse import Namespace

    from lab.cycles import subjects

    made = read(SHIPPED)
    changed = {**made.parameters, "tma_row": replace(made.parameters["tma_row"], value=1.1)}
    path = tmp_path / "table.json"
    path.write_text(json.dumps(replace(made, parameters=changed).document()))
    options = Namespace(parameters=path)
    found = subjects.gpu_of(options, arch="sm_90a")
    assert (found.name, found.value("tma_row")) == ("H200", 1.1)
    assert subjects.origin(options)["measured"] == len(made.parameters)
    with pytest.raises(ValueError, match="is of NVIDIA H200, not of H100"):
        subjects.gpu_of(options, "H100")
    with pytest.raises(ValueError, match="the kernel is for sm_100a"):
        subjects.gpu_of(options, arch="sm_100a")
    own = Namespace(parameters=None)
    assert subjects.gpu_of(own, arch="sm_90a") is gpus.H100
    assert subjects.origin(own) is None


# -- rows as from a GPU ---------------------------------------------------------------------------


def _measured(arch: str, device: str) -> list[dict]:
    """Rows of all benchmarks for an architecture, with meaningless numbers."""
    made: list[dict] = [{"kind": "setting", "device": {"name": device}, "date": "never"}]
    for number, each in enumerate(benchmarks_of(GROUPS, arch), start=1000):
        made.append({**_row(each.name, float(number), **each.variant), "group": each.group})
    return made


NOT_ON_HOPPER = "issue_fma2", "latency_tensor", "tma_issue", "latency_tensor_allocation"


@pytest.mark.parametrize(
    ("arch", "device", "others"),
    [
        ("sm_100a", "NVIDIA B200", set(rules.WGMMA)),
        ("sm_103a", "NVIDIA GB300", set(rules.WGMMA)),
        ("sm_90a", "NVIDIA H200", {*rules.TCGEN05, *NOT_ON_HOPPER}),
    ],
)
def test_a_whole_run_gives_every_parameter_that_has_a_rule(arch, device, others):
    """Every rule matches exactly one measured row."""
    made = table_of(_measured(arch, device), "rows.json")
    assert set(made.kept) == set(UNRULED) | others
    assert set(made.parameters) == set(RULES) - others


def test_tensor_memory_and_commits_follow_from_their_rows():
    """Assumes that an x32 load takes 32 cycles, and 60 more until its wait."""
    whole = {each["benchmark"] + str(sorted(each["variant"].items())): each
             for each in _measured("sm_100a", "NVIDIA B200")[1:]}  # fmt: skip

    def put(value: float, benchmark: str, **variant: object) -> None:
        found = [each for each in whole.values() if each["benchmark"] == benchmark
                 and variant.items() <= each["variant"].items()]  # fmt: skip
        assert found
        for each in found:
            each |= {"value": value, "low": value, "high": value}

    for repeat in (8, 16, 32, 64):
        put(repeat, "tmem_load", shape="32x32b", repeat=repeat)
        put(repeat + 60, "tmem_load_wait", shape="32x32b", repeat=repeat)
    for n, a in product((64, 128, 256), ("shared memory", "tensor memory")):
        put(n / 2, "tcgen05_mma", kind="f16", ctas=1, m=128, n=n, a=a)
        put(n / 2 + 136, "tcgen05_until_wait", ctas=1, m=128, n=n, a=a, per_commit=1)
    put(48, "tcgen05_mma", kind="f16", ctas=1, m=128, n=64, a="shared memory")
    put(60, "tcgen05_switch", n=64)
    put(84, "tcgen05_switch", n=128)
    rows = [{"kind": "setting", "device": {"name": "NVIDIA B200"}}, *whole.values()]
    found = {name: each.value for name, each in table_of(rows, "rows.json").parameters.items()}
    assert (found["tmem_load_rate"], found["tmem_load_latency"]) == (1, 60)
    assert (found["commit_latency_smem_1"], found["commit_latency_tmem_1"]) == (136, 136)
    assert (found["mma_overhead"], found["mma_smem_rate"], found["mma_switch"]) == (0, 128, 20)
