"""Forms of instructions: the committed table, its recorders, the programs, and the verdicts."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from concurrent.futures import TimeoutError as Late
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from unittest.mock import MagicMock, call

import numpy as np
import pytest

from kernelkit.compile.aot import serves
from lab.bringup import instructions, programs, table
from lab.bringup.instructions import (
    DIED,
    DIFFERS,
    EXPECTED,
    HANG,
    LEFT,
    MOST_HANGS,
    NEAR,
    REFUSED,
    RUNS,
    SAME,
    Judge,
    Row,
    blame,
)
from lab.bringup.programs import Trial
from lab.bringup.table import EVERY, Table, Use
from lab.silicon.conformance import elementwise, hw_runner, patterns
from lab.silicon.conformance.case import Case
from lab.silicon.conformance.ptx_program import FOLDER, Map
from ptxemu.machine import tensor_map

ARCH = "sm_100a"
REPOSITORY = Path(__file__).parents[2]
SHIPPED = ("fmha", "gqa_lowlatency", "kernelkit", "kvcache", "mla", "moe", "q8_0")
KNOWN = table.read(ARCH)
MADE = (  # one or two of each kind of generated program
    "mma f16 cta_group::1 m128 n64 k16 bf16 x bf16 -> f32, A TMEM, B 128B MN 0/1024",
    "mma mxf4nvf4 cta_group::2 m256 n128 k64 packed e2m1 x packed e2m1 -> f32, A 128B K 1024,"
    " B 128B K 1024, 4 ue4m3 scales",
    "mma mxf8f6f4 cta_group::1 m128 n16 k32 e4m3 x e2m1 -> f32, A 128B K 1024, B 128B K 1024,"
    " 1 ue8m0 scales ids 3 3",
    "mma f8f6f4 cta_group::1 m64 n8 k32 e4m3 x e5m2 -> f32, A 64B MN 0/512, B 128B K 0,"
    " D at column 8 of 16",
    "tcgen05.st.sync.aligned.16x128b.x8.b32",
    "tcgen05.alloc cta_group::2 of 64 columns",
    "tensor map 4d 16u4_align16b 128B loads",
    "tensor map 3d bf16 64B stores",
    "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    ".multicast::cluster.L2::cache_hint.cta_group::2",
    "cluster of 16",
    "mbarrier expects 0 bytes",
)


def program_of(name: str) -> Trial:
    """A program of `tests/ptxemu/ptx`."""
    (found,) = programs.from_files(name)
    return found


# -- the table ----------------------------------------------------------------------------------


def test_every_form_of_a_shipped_kernel_has_a_program_or_a_reason() -> None:
    untested = KNOWN.untested()
    assert [form for form, why in untested.items() if not why] == []
    for pattern, why in table.UNTESTED:
        assert any(re.fullmatch(pattern, form) for form in untested), f"stale: {why}"


def test_every_shipped_kernel_is_in_the_table() -> None:
    modules = {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        for folder in SHIPPED
        for path in (REPOSITORY / folder).rglob("*.py")
        if re.search(r"^def host_function", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    shipped = {name for name in modules if serves(name, "sm_100a")}
    assert shipped == KNOWN.kernels


def test_files_that_a_program_is_from_are_there() -> None:
    named = {name for use in KNOWN.forms.values() for name in use.programs}
    files = {name for name in named if name.startswith("ptx/")}
    assert files
    assert files <= {f"ptx/{path.stem}" for path in FOLDER.glob("*.ptx")}
    made = {f"generated/{case.name}" for case in programs.cases(KNOWN.forms)}
    assert {name for name in named if name.startswith("generated/")} <= made


def test_the_table_is_what_is_written() -> None:
    assert table.path_of(ARCH).read_text(encoding="utf-8") == KNOWN.text()
    assert table.read("sm_103a") == KNOWN


def test_kernels_of_forms_are_named_with_problems_unless_all_use_them() -> None:
    forms = {"a": Use({"k": ["one"], "l": EVERY}, []), "b": Use({"k": ["two"], "l": ["x"]}, [])}
    known = Table(ARCH, forms)
    assert known.kernels_of(["a", "b"]) == ["k (one; two)", "l"]
    assert known.kernels_of(["b"]) == ["k (two)", "l (x)"]
    assert table._some(["one"], {"one"}) == EVERY
    assert table._some(list("abcde"), {*"abcdef"}) == ["a", "b", "3 more"]


@pytest.mark.parametrize("words", [("64 base", "decode sm_100a parts"), ("moe pair", "cache")])
def test_some_problems_have_no_form_that_is_not_in_the_table(words: tuple[str, ...]) -> None:
    used, launched = table._used(ARCH, words)
    assert len(launched) > 1
    for form, kernels in used.items():
        assert kernels.keys() <= KNOWN.forms[form].kernels.keys(), form


def test_the_table_is_what_generation_gives() -> None:
    assert table.generated(ARCH).text() == KNOWN.text()


def test_each_program_of_the_table_holds_its_forms() -> None:
    named = {name for use in KNOWN.forms.values() for name in use.programs}
    found = {t.name: t.forms(ARCH) for t in programs.every(KNOWN.forms) if t.name in named}
    for form, use in KNOWN.forms.items():
        for name in use.programs:
            assert form in found[name]


# -- forms and programs -------------------------------------------------------------------------


def test_what_a_run_shows_is_in_the_forms_of_a_program() -> None:
    forms = program_of("tcgen05_mma").forms(ARCH)
    assert forms >= {
        "tcgen05.mma.cta_group::1.kind::f16",
        "mma f16 cta_group::1 m128 n64 k16 f16 x f16 -> f32, A none K 128/512, B none K 128/512",
        "tcgen05.alloc cta_group::1 of 64 columns",
    }
    forms = program_of("block_scaled_pair").forms(ARCH)
    assert "tcgen05.cp 64x128b warpx2::01_23 cta_group::2 none 128/128" in forms
    assert "cluster of 2" in forms
    assert "tensor map 4d f32 none stores" in program_of("tensor_4d").forms(ARCH)


@pytest.mark.parametrize("form", MADE)
def test_a_program_is_generated_that_holds_the_form(form: str) -> None:
    (case,) = programs.cases([form])
    outputs, forms = Trial("made", case).emulated(ARCH)
    assert form in forms
    assert any(found.any() for found in outputs.values())


def test_a_generated_product_is_that_of_its_operands() -> None:
    """Two steps of 16, of rows of 128 bytes in the pattern of their swizzle."""
    form = "mma f16 cta_group::1 m128 n32 k16 bf16 x bf16 -> f32, A TMEM, B 128B K 1024"
    (case,) = programs.cases([form])
    image, a, _ = (param.data for param in case.program.params)

    def numbers(codes: np.ndarray) -> np.ndarray:
        return (codes.view("u2").astype("u4") << 16).view("f4")

    row, byte = np.arange(32)[:, None], np.arange(0, 64, 2)
    place = row * 128 + (byte ^ (row % 8 << 4))
    b = numbers(image.view("u2"))[place // 2]
    (found,) = Trial("made", case).emulated(ARCH)[0].values()
    assert (found.view("f4").reshape(128, 32) == numbers(a).reshape(128, 32) @ b.T).all()


def test_what_moves_comes_back() -> None:
    for form in (
        "tcgen05.alloc cta_group::1 of 32 columns",
        "tcgen05.ld.sync.aligned.32x32b.x8.b32",
        "ld.global.nc.v4.b32",
        "ld.global.L1::no_allocate.v2.b32",
    ):
        (case,) = programs.cases([form])
        source = case.program.params[0].data
        assert (Trial("made", case).emulated(ARCH)[0]["d"] == source).all()
    (case,) = programs.cases(["tcgen05.ld.sync.aligned.16x256b.x2.b32"])
    lanes = case.program.params[0].data.reshape(128, 128)
    loaded = Trial("made", case).emulated(ARCH)[0]["y"]
    assert (np.sort(loaded) == np.sort(lanes[:, :16], axis=None)).all(), "both halves of the lanes"
    (case,) = programs.cases(["cluster of 16"])
    (found,) = Trial("made", case).emulated(ARCH)[0].values()
    assert (found == np.roll(3 * np.arange(16) + 5, 1)).all()


def test_what_is_no_form_is_not_generated() -> None:
    assert not [*programs.cases(["mov.u32", "mma f16 of three", MADE[0] + ", lanes disabled"])]


def test_programs_hold_every_wanted_form_once() -> None:
    wanted = {"add.rn.f32x2", "griddepcontrol.wait", "fma.rn.f32", "cluster of 16"}
    found = [trial for trial in programs.every(wanted) if not trial.checked]
    assert all(trial.case.forms & wanted for trial in found)
    assert wanted <= {form for trial in found for form in trial.case.forms}


def test_the_assembler_takes_every_program() -> None:
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("no ptxas")
    kinds = ("tcgen05.", "cp.async.bulk.tensor")
    forms = [form for form in KNOWN.forms if " " in form or form.startswith(kinds)]
    for test in programs.every(forms):
        command = [ptxas, f"-arch={ARCH}", "-o", "/dev/null", "/dev/stdin"]
        text = test.case.program.text
        said = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert not said.stderr, f"{test.name}: {said.stderr}"


# -- launching them on a GPU --------------------------------------------------------------------


def test_types_of_tensor_maps_have_the_names_of_the_driver() -> None:
    kinds = pytest.importorskip("cuda.bindings.driver").CUtensorMapDataType
    for dtype in tensor_map.DTYPES:
        assert hasattr(kinds, f"CU_TENSOR_MAP_DATA_TYPE_{hw_runner.type_name(dtype)}"), dtype
    assert hw_runner.type_name("bf16") == "BFLOAT16"


def test_strides_of_elements_that_are_less_than_a_byte() -> None:
    assert Map("m", "x", "16u4_align16b", (256, 12, 3), (128, 8, 2)).strides() == (128, 1536)


@pytest.mark.parametrize(("ctas", "asked"), [(16, True), (8, False)])
def test_clusters_that_not_every_gpu_has_are_asked_for(ctas: int, asked: bool) -> None:
    driver = MagicMock()
    driver.cuFuncSetAttribute.return_value = driver.cuLaunchKernelEx.return_value = (0,)
    (case,) = programs.cases([f"cluster of {ctas}"])
    hw_runner._launch(driver, case.program, "kernel", {"d": 4096})
    wish = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    assert (call("kernel", wish, 1) in driver.cuFuncSetAttribute.mock_calls) == asked
    assert driver.cuLaunchKernelEx.call_count == 1


# -- verdicts -----------------------------------------------------------------------------------


class Here:
    """A stand-in for a process that calls functions directly.

    `gpu` makes the GPU's outputs from the right ones.
    """

    def __init__(self, gpu=None) -> None:
        self.gpu = gpu

    def ask(self, function, *arguments):
        if function is not hw_runner.launch:
            return function(*arguments)
        return self.gpu(Trial("", Case("", arguments[0], {})).emulated(ARCH)[0])

    def close(self) -> None: ...


def judged(test: Trial, gpu=None) -> Row:
    (row,) = Judge(ARCH, KNOWN, Here(), Here(gpu) if gpu else None).rows([test])
    return row


def flipped(outputs):
    for found in outputs.values():
        found.view("u1")[0] ^= 1
    return outputs


def refusing(error: Exception):
    def refuse(_):
        raise error

    return refuse


def test_verdicts_of_a_gpu() -> None:
    test = program_of("warp_vote")
    row = judged(test, lambda outputs: outputs)
    assert (row.verdict, row.differences) == (SAME, [])
    assert "vote.sync.ballot.b32" in row.forms
    row = judged(test, flipped)
    assert row.verdict == DIFFERS
    assert "1 of " in row.differences[0]
    assert "vote.sync.ballot.b32" in row.wrong
    for error, verdict in (
        (Late(), HANG),
        (BrokenProcessPool("gone"), DIED),
        (RuntimeError("cuCtxSynchronize: 715"), DIED),
        (hw_runner.Lacking("no such cluster"), REFUSED),
        (RuntimeError("cuModuleLoadDataEx: 218: no such instruction"), REFUSED),
    ):
        row = judged(test, refusing(error))
        assert row.verdict == verdict
        assert row.failed
    assert "no such instruction" in row.differences[0]


def test_an_approximation_may_differ_within_its_bounds() -> None:
    chosen = tuple(v for v in patterns.variants() if v.opcode == "ex2.approx.f32")
    test = Trial("ex2", elementwise.case(chosen[:1], uniform=False))

    def near(outputs):
        values = outputs["d0"]
        values[(values > 0x3F800000) & (values < 0x40000000)] += 1
        return outputs

    assert judged(test, near).verdict == NEAR
    assert judged(test, flipped).verdict in (NEAR, DIFFERS)


def test_a_gpu_that_agrees_with_the_emulator_may_be_unlike_the_file(monkeypatch) -> None:
    test = program_of("warp_vote")
    test.case.program.outputs()[0].expected[3] ^= 1
    row = judged(test, lambda outputs: outputs)
    assert row.verdict == DIFFERS
    assert "[3]" in row.differences[0]
    assert judged(test).verdict == DIFFERS


def test_verdicts_of_the_emulator_alone() -> None:
    assert judged(program_of("warp_vote")).verdict == EXPECTED
    (case,) = programs.cases(["mbarrier expects 0 bytes"])
    assert judged(Trial("made", case)).verdict == RUNS


def test_after_some_hangs_nothing_more_is_run() -> None:
    judge = Judge(ARCH, KNOWN, Here(), Here(refusing(Late())))
    rows = [*judge.rows([program_of("warp_vote")] * (MOST_HANGS + 2))]
    assert [row.verdict for row in rows] == [HANG] * MOST_HANGS + [LEFT] * 2
    assert all(row.failed for row in rows)


def test_hangs_with_others_between_them_stop_nothing() -> None:
    turns = itertools.cycle([Late(), RuntimeError("cuCtxSynchronize: 715")])
    judge = Judge(ARCH, KNOWN, Here(), Here(lambda _: refusing(next(turns))(_)))
    rows = [*judge.rows([program_of("warp_vote")] * (2 * MOST_HANGS + 1))]
    assert [row.verdict for row in rows] == [HANG, DIED] * MOST_HANGS + [HANG]


def test_forms_that_another_program_shows_to_be_right_are_not_blamed() -> None:
    forms = {name: Use({kernel: EVERY}, []) for name, kernel in (("a", "k"), ("b", "l"))}
    known = Table(ARCH, {**forms, "c": Use({"m": EVERY}, [])})
    good = Row("good", SAME, forms=["a"])
    hangs, differs = Row("hangs", HANG, forms=["a", "b"]), Row("differs", DIFFERS, forms=["b", "c"])
    differs.differ({"c": ["GPU 1, ptxemu 2"], "of no kernel": ["GPU 1, ptxemu 2"]})
    assert differs.differences == ["GPU 1, ptxemu 2"]
    known_bad = Row("known", DIED, forms=["a"])
    blame([good, hangs, differs, known_bad], known)
    assert (good.kernels, hangs.kernels, differs.kernels) == ([], ["l"], ["m"])
    differs.forms, known.forms["mma m64"] = ["c", "mma m64"], Use({"n": EVERY}, [])
    blame([differs], known)
    assert differs.kernels == ["m", "n"], "no output speaks for a form that only a run shows"
    assert known_bad.kernels == ["k"], "all of its forms run elsewhere: any may be the reason"


# -- the command --------------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch) -> None:
    monkeypatch.setattr(instructions, "Device", Here)
    monkeypatch.setattr(instructions, "every", lambda wanted: programs.from_files("[nt]*_[2mv]*"))


def test_rows_are_said_and_written(here, tmp_path: Path, capsys) -> None:
    path = tmp_path / "rows.json"
    words = ["--emulate", "--only", "ptx/tmem_move", "ptx/tensor_2d", "--json", str(path)]
    assert instructions.main(words) == 0
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert [row["program"] for row in rows] == ["ptx/tensor_2d", "ptx/tmem_move"]
    assert rows[0].keys() == {"program", "verdict", "seconds"}
    assert "2 as expected" in capsys.readouterr().out


def test_a_failure_names_the_kernels(here, monkeypatch, capsys) -> None:
    def wrong(test, _):
        return {form: ["[0] wrong"] for form in test.case.forms}

    monkeypatch.setattr(instructions, "unlike_file", wrong)
    assert instructions.main(["--emulate", "--only", "ptx/narrow_a", "ptx/tcgen05_mma"]) == 1
    said = capsys.readouterr().out
    assert "[0] wrong" in said
    assert "used by" in said
    assert "fmha.sm100.kernel" in said


def test_without_a_gpu_of_the_architecture_it_is_refused(here, monkeypatch, capsys) -> None:
    assert instructions.main(["--only", "ptx/warp_vote"]) == 2
    assert "--emulate" in capsys.readouterr().err
    monkeypatch.setattr(hw_runner, "device", lambda: {"gpu": "H100", "target": "sm_90a"})
    assert instructions.main(["--only", "ptx/warp_vote"]) == 2
    assert "H100 is sm_90a" in capsys.readouterr().err
