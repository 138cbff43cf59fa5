"""ptxemu compared with silicon: with results recorded on a GPU, and with --hw with the local GPU.

`scripts/conformance.py` runs all cases and writes the results. Here every part of the registry must
be in them, and a sample of the cases must still give the GPU's results. `make sweep` runs all
cases.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import ptxemu
from lab.silicon.conformance import (
    bounds,
    coverage,
    elementwise,
    everything,
    hw_runner,
    misc,
    patterns,
    precision,
    values,
)
from lab.silicon.conformance.campaign import Campaign, emulated, refusals
from lab.silicon.conformance.case import Case
from lab.silicon.conformance.journal import Journal
from ptxemu import Options
from ptxemu.errors import UnsupportedPtx

RESULTS = Path(__file__).parents[2] / "results" / "conformance_h100.json"
INPUTS = 1000  # at least, of each form
SAMPLE, ON_GPU = 97, 12  # one in as many cases
NAN = 0x7FC00005


@cache
def _record() -> dict:
    return json.loads(RESULTS.read_text(encoding="utf-8"))


@cache
def _cases() -> tuple[list[Case], list[str]]:
    """Return the cases of the record, and the names of newer ones."""
    return everything.recorded(_record())


def _unlike_silicon(cases: list[Case], options: Options | None = None) -> list[str]:
    results = ((case, case.emulated(options)) for case in cases)
    return list(everything.unlike(_record(), results))


def _left(ran: list[str]) -> dict[coverage.Item, str]:
    """Return the parts of the registry that none of these cases covers, with the reason."""
    return coverage.missing(ran, _record()["refused_for_this_gpu"])


# -- the record -------------------------------------------------------------------------------

# Instructions of attention and of products with quantised weights on GPUs that only have mma.sync:
# none of them is based on the manual alone.
MMA_SYNC = (
    "mma.sync.aligned.m16n8{k8|k16}.row.col.{f32.f16.f16.f32|f16.f16.f16.f16|f32.bf16.bf16.f32}",
    "mma.sync.aligned.m16n8{k16|k32}.row.col{|.satfinite}.s32.{s8|u8}.{s8|u8}.s32",
    "mma.sync.aligned.m16n8{k16|k32}.row.col.f32.{e4m3|e5m2}.{e4m3|e5m2}.f32",
    "mma.sync.aligned.m16n8{k16|k32}.row.col.f16.{e4m3|e5m2}.{e4m3|e5m2}.f16",
    "ldmatrix.sync.aligned.m8n8.{x1|x2|x4}{|.trans}.shared.b16",
    "movmatrix.sync.aligned.m8n8.trans.b16",
    "cp.async.{ca|cg}.shared.global{|.L2::128B}",
    "cp.async.{commit_group|wait_group|wait_all}",
    "dp4a.{u32|s32}.{u32|s32}",
    "prmt.b32{|.f4e|.b4e|.rc8|.ecl|.ecr|.rc16}",
    "cvt{.rn|.rz}.{f16x2|bf16x2}.f32",
    "cvt.rn.f16x2.{e4m3x2|e5m2x2}",
    "cvt.rn.satfinite.{e4m3x2|e5m2x2}.{f32|f16x2}",
    "cvt.f32.{f16|bf16}",
    "cvt.rn.{f16|bf16}.f32",
    "cvt.rn.{f32|f16}.{s8|u8|s16|s32|u32}",
    "cvt.{rni|rzi}.{s8|s16|s32|u32}.f32",
    "cvt.pack.sat.{s8|u8}.s32.b32",
    "{max|min}{|.NaN}.{f32|f16x2|bf16x2}",
    "redux.sync.{add|min|max}.{s32|u32}",
    "shfl.sync.{bfly|idx|up|down}.b32",
)


@pytest.mark.parametrize("pattern", MMA_SYNC)
def test_silicon_has_answered_for_what_mma_sync_needs(pattern: str) -> None:
    known = {*_record()["forms"], *_record()["approximations"]}
    assert not set(patterns.expand(pattern)) - known


def test_every_item_of_the_registry_ran_was_refused_or_has_a_reason() -> None:
    ran = [*_record()["forms"], *_record()["approximations"]]
    left = _left(ran)
    if not all(left.values()):  # programs newer than the record may contain it
        left = _left([*ran, *_cases()[1]])
    unexplained = [item for item, why in left.items() if not why]
    assert not unexplained, f"in no program and in no list: {unexplained[:20]}"
    texts = [" ".join(item) for item in left]
    for pattern, why in coverage.UNWITNESSED:
        assert any(re.fullmatch(pattern, text) for text in texts), f"stale: {pattern}: {why}"


def test_a_form_that_no_program_holds_is_noticed() -> None:
    left = _left([form for form in _record()["forms"] if not form.startswith("stmatrix")])
    assert {item[1] for item, why in left.items() if not why} >= {"trans", "x4", "b16"}


def test_the_record_may_be_older_than_some_programs() -> None:
    """An instruction, a form in a program with several, and a program are not recorded."""
    new = ("lop3.b32", "atom.shared.add.u32")
    forms = {form: row for form, row in _record()["forms"].items() if form not in new}
    silicon = {name: x for name, x in _record()["silicon"].items() if name != "cluster of 8"}
    kept, newer = everything.recorded(_record() | {"forms": forms, "silicon": silicon})
    assert {*new, "cluster of 8", "atom operations.shared"} <= set(newer)
    assert not any(case.forms & set(new) for case in kept)
    assert "cluster of 4" in {case.name for case in kept}


def test_the_record_is_of_every_case_with_enough_inputs_and_no_open_difference() -> None:
    record = _record()
    assert {"gpu", "driver", "date", "ptx", "programs"} <= set(record["setting"])
    few = {form for form, (inputs, _) in record["forms"].items() if inputs < INPUTS}
    newer = set(_cases()[1])  # their inputs are added when they have run
    cases = everything.cases(record["refused_for_this_gpu"]) if few else ()
    assert few <= {form for case in cases if case.name in newer for form in case.forms}
    differs = {form for form, (inputs, same) in record["forms"].items() if same < inputs}
    assert differs == set(record["explained"])
    assert not record["different"]
    assert not record["failed"]
    assert set(record["silicon"]) == {case.name for case in _cases()[0]}


def test_approximations_are_within_the_bounds_of_the_manual() -> None:
    for form, row in _record()["approximations"].items():
        assert max(row["gpu_error"], row["ptxemu_error"]) <= 1, form
        assert row["inputs"] >= INPUTS


# -- the current ptxemu -------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [pattern for pattern, _ in coverage.DECLINED])
def test_what_a_gpu_has_and_ptxemu_has_not_is_refused_by_name(pattern: str) -> None:
    for text in patterns.expand(pattern):
        module = ptxemu.load(coverage.question([text])[0].replace("sm_100a", "sm_90a"))
        with pytest.raises(UnsupportedPtx, match=re.escape(text.split()[0])) as caught:
            module.launch(grid=(1, 1, 1), block=(32, 1, 1), params=[])
        assert caught.value.line


def test_cache_policies_leave_data_alone() -> None:
    (case,) = (case for case in misc.cases() if case.name == "cache policies")
    (source, _) = case.program.buffers()
    assert (case.emulated()["d"].reshape(-1, source.data.size) == source.data).all()


def test_a_sample_still_gives_what_the_gpu_gave() -> None:
    assert not _unlike_silicon(_cases()[0][::SAMPLE])


@pytest.mark.parametrize("policy", ["round-robin", "adversarial"])
def test_all_cases_give_what_the_gpu_gave(policy: str) -> None:
    assert not _unlike_silicon(_cases()[0], Options(policy=policy, seed=1, limit=None))


def test_all_sums_are_those_of_the_gpu() -> None:
    """Sums are compared bit for bit if the record has them."""
    record = _record()
    how, cases = ("aligned", record["setting"]["target"]), everything.recorded_sums(record)
    assert not list(everything.unlike(record, emulated(cases, 1, how)))


@pytest.mark.hw
def test_the_gpu_at_hand_agrees() -> None:
    """Every ON_GPU-th case, elementwise ones included, agrees bit for bit or within the bound."""
    found = Campaign()
    cases = list(everything.cases(_record()["refused_for_this_gpu"]))
    for case in cases[::ON_GPU]:
        found.judge(case, hw_runner.run(case.program), case.emulated())
    wrong = {form: tally.examples for form, tally in everything.different(found).items()}
    assert not wrong


# -- the tools can fail ---------------------------------------------------------------------------


def test_a_session_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    path, setting = tmp_path / "session.jsonl", {"gpu": "some", "driver": "1"}
    first, second = _small("add.rn.f32"), _small("mul.rn.f32")
    said = Campaign()
    said.judge(first, first.emulated(), first.emulated())
    Journal(path, setting).keep(first, said)
    path.write_text(path.read_text() + '{"case": "cut o')
    found, journal = Campaign(), Journal(path, setting)
    assert journal.restore(first, found)
    assert not journal.restore(second, found)
    assert (found.forms, found.digests) == (said.forms, said.digests)
    first.program.params[0].data = first.program.params[0].data + 1
    assert not journal.restore(first, found), "its inputs are others"
    with pytest.raises(ValueError, match="other"):
        Journal(path, setting | {"gpu": "other"})


def _tensor_core(chosen: list[precision.Probe], bits: int, together: int) -> np.ndarray:
    """Sums of `together` products with the total so far, truncated `bits` bits below the
    largest."""
    out = []
    for probe in chosen:
        total = probe.c
        for start in range(0, 16, together):
            parts = [total]
            for place in range(start, start + together):
                sign, exponent = probe.products.get(place, (0, 0))
                parts.append(sign * 2.0**exponent)
            unit = 2.0 ** (np.frexp(max(map(abs, parts)))[1] - 1 - bits)
            total = float(sum(np.trunc(part / unit) * unit for part in parts))
        out.append(total)
    return np.array(out)


def test_probes_of_precision_tell_what_a_tensor_core_does() -> None:
    chosen = list(precision.probes(16, narrow=False))
    found = precision.summary(16, False, chosen, _tensor_core(chosen, 13, 16))
    assert (found["kept"], found["C"], found["of C"]) == ("13", "13", "13")
    assert (found["near"], found["sum"]) == ("--" + "." * 14, "0")
    found = precision.summary(16, False, chosen, _tensor_core(chosen, 25, 8))
    assert (found["kept"], found["3/4"], found["1/2"]) == ("25", "0.75/0.75", "0.5")
    assert (found["near"], found["across"]) == ("--......++++++++", "-" + "." * 14 + "-")


def _small(opcode: str) -> Case:
    chosen = tuple(v for v in patterns.variants() if v.opcode == opcode)
    return elementwise.case(chosen[:1], uniform=False)


def test_one_wrong_bit_of_one_input_is_a_difference() -> None:
    case, found = _small("add.rn.f32"), Campaign()
    right = case.emulated()
    wrong = {name: data.copy() for name, data in right.items()}
    wrong["d0"][7] ^= 1
    found.judge(case, wrong, right)
    assert found.forms["add.rn.f32"].same == elementwise.INPUTS - 1
    assert "element" in found.forms["add.rn.f32"].examples[0]
    assert case.digest(wrong) != case.digest(right)


@pytest.mark.parametrize(("opcode", "ulps"), [("ex2.approx.f32", 3), ("rcp.approx.f32", 2)])
def test_an_approximation_beyond_its_bound_is_a_difference(opcode: str, ulps: int) -> None:
    case, found = _small(opcode), Campaign()
    right = case.emulated()
    found.judge(case, right, right)
    assert found.forms[opcode].right
    finite = np.flatnonzero(np.abs(right["d0"].view(np.float32) - 2) < 1)[:1]
    wrong = {"d0": right["d0"].copy()}
    wrong["d0"][finite] += ulps
    found.judge(case, wrong, right)
    assert not found.forms[opcode].right


def test_special_values_of_an_approximation_are_exact() -> None:
    (bound,) = bounds.bounds_of("rcp.approx.f32")
    inputs = np.array([0, 1 << 31, 0x7F800000, NAN, 0x3F800000], np.uint32)
    right = np.array([0x7F800000, 0xFF800000, 0, NAN, 0x3F800000], np.uint32)
    assert bounds.excess("rcp.approx.f32", bound, [inputs], right).max() <= 1
    for k in range(4):
        wrong = right.copy()
        wrong[k] = 0x3F800000
        assert bounds.excess("rcp.approx.f32", bound, [inputs], wrong)[k] > 1


def test_lines_that_stop_the_compiler_are_asked_about_once() -> None:
    def compiler(text: str) -> str:
        lines = text.split("\n")
        if "nonsense" in lines:
            return f"line {lines.index('nonsense') + 5}; fatal   : Parsing error"
        return "".join(
            f"line {k}; error   : needs more\n" for k, x in enumerate(lines, 5) if x == "new"
        )

    found = refusals(compiler, ["old", "nonsense", "new", "old"], lambda left: ("\n".join(left), 5))
    assert found == {1: "Parsing error", 2: "needs more"}


def test_programs_are_lowered_to_what_the_driver_takes() -> None:
    text = elementwise.HEADER
    assert ".version 8.5" in hw_runner.lowered(text, (9, 0), (8, 5))
    assert ".target sm_90a" in hw_runner.lowered(text, (9, 0), (8, 5))
    assert hw_runner.lowered(text, (10, 0), (9, 0)) == text


def test_inputs_hold_every_pair_of_edges_and_never_change() -> None:
    a, b, c = values.operands(("f32", "f32", "u32<32"), "pairs", elementwise.INPUTS)
    edges = {int(x) for x in values.edges("f32")}
    pairs = {(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)}
    assert pairs >= {(x, y) for x in edges for y in edges}
    assert c.max() < 32
    assert values.random_words("fixed", 2).tolist() == [1047210667856953657, 6350335401233606281]
