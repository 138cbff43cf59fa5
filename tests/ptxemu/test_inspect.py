"""Looking inside a launch: pictures at a line, histories of ranges, the last events."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import numpy as np
import pytest

import ptxemu
from ptxemu.host import cuda_stubs
from ptxemu.host.command_line import add_inspect_arguments, inspecting, inspection_of
from ptxemu.host_tensor import HostTensor
from ptxemu.inspect import Inspect, Region, Stop, Watch, first_difference, first_tile_difference
from ptxemu.machine import tensor_map
from ptxemu.module import Module
from ptxemu.request import Condition
from tests.ptxemu.kernels import DYNAMIC, POINTER, kernel, launch

CELL = ".shared .align 4 .b8 cell[4];\n"
POLICIES = ("round-robin", "random", "adversarial")


def lined(body: str, params: str = ".param .u64 d", before: str = CELL) -> Module:
    """A kernel with line information: "@12" sets line 12 of folder/kernel.py."""
    words = [
        f".loc 1 {word[1:]} 1\n" if word.startswith("@") and word[1:].isdigit() else word
        for word in body.split(" ")
    ]
    return ptxemu.load(kernel(" ".join(words), params, before) + '\n.file 1 "folder/kernel.py"\n')


LOOP = lined(
    POINTER
    + """ @10 mov.u32 %r1, 0;
LOOP: @12 add.u32 %r2, %r1, %r0; st.global.u32 [%rd2], %r2;
    @13 add.u32 %r1, %r1, 1; st.shared.u32 [cell], %r1;
    setp.lt.u32 %p0, %r1, 5; @%p0 bra LOOP;
    @20 ld.shared.u32 %r4, [cell];"""
)


def quiet(*stops: Stop, **more: object) -> Inspect:
    return Inspect(stops=stops, quiet=True, **more)


def seen(stop: Stop, module: Module = LOOP, **how: object) -> list:
    d = np.zeros(64, np.uint32)
    report = launch(module, d, block=(64,), inspect=quiet(stop), **how)
    return report.inspection.snapshots


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_each_arrival_of_a_warp_is_a_step(policy, check):
    found = seen(Stop("kernel.py:12", warp=1), policy=policy, check=check)
    assert [(p.step, p.registers["%r1"].values[0]) for p in found] == [(k, k) for k in range(5)]
    assert {p.instr.line for p in found} == {found[0].instr.line}
    np.testing.assert_array_equal(found[0].registers["%r0"].values, np.arange(32, 64))


def test_the_memory_is_as_before_the_line():
    found = seen(Stop("folder/kernel.py:13", cta=0, warp=0))
    cells = [p.shared[p.symbols["cell"] :][:4].view(np.uint32)[0] for p in found]
    assert cells[1:] == [1, 2, 3, 4]


def test_operands_come_first_and_dead_registers_are_left_out():
    (picture,) = seen(Stop("kernel.py:20", warp=0))
    assert picture.operands == ("%r4",)
    assert set(picture.registers) == {"%r4"}
    loop = seen(Stop("kernel.py:12", warp=0))[0]
    assert {"%r0", "%r1", "%rd2"} < set(loop.registers)
    assert not {"%p0", "%r4"} & set(loop.registers)  # they are written before they are read


@pytest.mark.parametrize(
    ("when", "steps"),
    [("step==3", [3]), ("%r1 > 2", [3, 4]), ("r1 % 2 == 1 and step < 3", [1]), ("lane == 40", [])],
)
def test_a_condition_chooses(when, steps):
    assert [p.step for p in seen(Stop("kernel.py:12", warp=0, when=when))] == steps


def test_lanes_that_differ_count_by_any():
    assert seen(Stop("kernel.py:12", when="%r0 == 40"))[0].warp == 1
    assert not seen(Stop("kernel.py:12", when="all(%r0 == 40)"))


def test_a_wait_that_is_tried_again_is_one_arrival():
    module = lined(
        """mov.u32 %r0, %tid.x; setp.ge.u32 %p0, %r0, 32; @%p0 bra OTHERS;
        @30 bar.sync 1, 64;
        @31 bra END;
        OTHERS: mov.u32 %r1, 0;
        WORK: @40 add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 9; @%p1 bra WORK;
        @41 bar.sync 1, 64;
        END:"""
    )
    for policy in POLICIES:
        assert [p.warp for p in seen(Stop("kernel.py:30"), module, policy=policy)] == [0]
    assert len(seen(Stop("kernel.py:40"), module)) == 1  # a loop within the line


def test_lanes_that_come_apart_come_twice():
    module = lined(
        """mov.u32 %r0, %tid.x; mov.u32 %r1, 7; setp.lt.u32 %p0, %r0, 8; @%p0 bra HERE;
        @50 mov.u32 %r1, 9;
        HERE: @51 st.shared.u32 [cell], %r1;"""
    )
    found = seen(Stop("kernel.py:50", warp=0), module)
    assert [p.lanes for p in found] == [0xFFFFFF00]


def test_a_line_without_instructions_moves_to_the_next_one():
    d = np.zeros(64, np.uint32)
    report = launch(LOOP, d, inspect=quiet(Stop("kernel.py:15")))
    assert "taken is kernel.py:20" in report.inspection.notes[0]
    assert len(report.inspection.snapshots) == 1
    for at, words in (
        ("kernel.py:99", "lines near it"),
        ("other.py:3", "its files: folder/kernel.py"),
        ("ptx:9999", "line 9999 of the PTX"),
    ):
        (note,) = launch(LOOP, d, inspect=quiet(Stop(at))).inspection.notes
        assert words in note
    plain = ptxemu.load(kernel(""))
    (note,) = launch(plain, inspect=quiet(Stop("kernel.py:1"))).inspection.notes
    assert "CUTE_DSL_LINEINFO=1" in note


def test_pictures_beyond_the_limit_are_counted():
    d = np.zeros(64, np.uint32)
    report = launch(LOOP, d, inspect=quiet(Stop("kernel.py:12", limit=2)))
    assert len(report.inspection.snapshots) == 2
    assert report.inspection.notes == [
        "kernel.py:12: 5 arrivals fit, pictures of the first 2 taken"
    ]


def test_files_read_back(tmp_path):
    d = np.zeros(64, np.uint32)
    stop = Stop("kernel.py:12", warp=0, when="step==3", regions=(Region("c", 1024, 1, 1, "u32"),))
    wanted = Inspect(stops=(stop,), folder=str(tmp_path), watches=(Watch("shared", 1024, 4),))
    (folder,) = launch(LOOP, d, inspect=wanted).inspection.paths
    assert folder.name == "000_cta0_warp0_step3"
    assert np.load(folder / "smem.npy")[1024:1028].view(np.uint32) == [3]
    assert np.load(folder / "c.npy") == [[3]]
    assert (np.load(folder / "regs.npz")["%r1"] == 3).all()
    assert np.load(folder / "tmem.npz")["f32"].shape == (128, 512)
    assert "cell" in (folder / "smem.txt").read_text()
    assert "%r1      b32   all 0x3" in (folder / "regs.txt").read_text()
    where = (folder / "where.txt").read_text()
    assert "step 3" in where
    assert "= 0x3" in where


# -- tiles and tensor memory ----------------------------------------------------------------

MAPS = """@5 mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 0; mov.u32 %r1, dynamic;
    add.u32 %r9, %r1, 4096;
    @%p0 mbarrier.init.shared.b64 [%r9], 1; bar.sync 0;
    mov.u64 %rd2, m; cvta.param.u64 %rd2, %rd2; mov.u32 %r2, 16; mov.u32 %r3, 3;
    @!%p0 bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r9], 1024;
    @8 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1+1024], \
[%rd2, {%r2, %r3}], [%r9];
    WAIT: mbarrier.try_wait.parity.shared.b64 %p7, [%r9], 0; @!%p7 bra WAIT;
    @9 mov.u32 %r5, 0;"""


@pytest.mark.parametrize("swizzle", ["none", "32B", "64B", "128B"])
def test_a_tile_of_tma_is_seen_as_the_tensor_that_it_is(swizzle):
    x = np.arange(40 * 80, dtype=np.float32).reshape(40, 80)
    columns = {"none": 32, "32B": 8, "64B": 16, "128B": 32}[swizzle]
    rows = 256 // columns
    described = tensor_map.encode(x.ctypes.data, (80, 40), (320,), (columns, rows), "f32", swizzle)
    module = lined(MAPS, ".param .align 64 .b8 m[128]", DYNAMIC)
    named = Region("mine", 2048, rows, columns, "f32", swizzle)
    stop = Stop("kernel.py:9", regions=(named,))
    report = launch(
        module,
        smem_bytes=8192,
        params=[described],
        inspect=quiet(stop, watches=(Watch("shared", 2048 + 64, 16),)),
        policy="random",
    )
    (picture,) = report.inspection.snapshots
    tile = picture.tile("tile_0x800")
    np.testing.assert_array_equal(tile.values, x[3 : 3 + rows, 16 : 16 + columns])
    np.testing.assert_array_equal(picture.tile("mine").values, tile.values)
    offset = tile.byte_of((1, 5))
    assert picture.shared[offset : offset + 4].view(np.float32) == x[4, 21]
    (writes,) = report.inspection.histories().values()
    assert writes[0].agent == "TMA, issued by warp 0 of cta(0,0,0)"
    assert writes[0].source == "folder/kernel.py:8"


TMEM = lined(
    """@5 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [cell], 32;
    ld.shared.u32 %r1, [cell];
    mov.u32 %r2, %laneid; cvt.rn.f32.u32 %f0, %r2; mov.b32 %r3, %f0; mov.b32 %r4, 0x40003f80;
    @6 tcgen05.st.sync.aligned.32x32b.x2.b32 [%r1], {%r3, %r4}; tcgen05.wait::st.sync.aligned;
    @7 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;""",
    "",
)


@pytest.mark.parametrize("policy", POLICIES)
def test_tensor_memory_is_lanes_by_columns(policy):
    wanted = quiet(Stop("kernel.py:7", dump=("tmem",)), watches=(Watch("tensor", 0, 2),))
    report = launch(TMEM, policy=policy, inspect=wanted)
    (picture,) = report.inspection.snapshots
    assert picture.allocations == {0: 32}
    np.testing.assert_array_equal(picture.tensor_memory()[:32, 0], np.arange(32))
    assert picture.tensor_memory("bf16")[5, 2:4].tolist() == [1.0, 2.0]
    assert picture.shared is None
    (writes,) = report.inspection.histories().values()
    assert ["allocated" in write.agent for write in writes] == [True, False]
    assert writes[1].source == "folder/kernel.py:6"


# -- histories --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_who_wrote_in_order_with_values(policy):
    d = np.zeros(64, np.uint32)
    wanted = quiet(watches=(Watch("global", 4 * 33, 8, parameter=0),), keep=3)
    report = launch(LOOP, d, block=(64,), inspect=wanted, policy=policy)
    (writes,) = report.inspection.histories().values()
    assert [write.value.view(np.uint32).tolist() for write in writes] == [
        [35, 36], [36, 37], [37, 38],
    ]  # fmt: skip
    assert {write.agent for write in writes} == {"warp 1 of cta(0,0,0)"}
    assert {write.lanes for write in writes} == {(1, 2)}
    assert {write.source for write in writes} == {"folder/kernel.py:12"}
    assert "5, the last 3" in report.inspection.history_text()


def test_an_atomic_says_so():
    module = lined(POINTER + " @7 atom.global.add.u32 %r5, [%rd1], 1;")
    d = np.zeros(32, np.uint32)
    report = launch(module, d, inspect=quiet(watches=(Watch.tensor(d[:1]),), keep=50))
    (writes,) = report.inspection.histories().values()
    assert [write.value.view(np.uint32)[0] for write in writes] == list(range(1, 33))
    assert "atomic" in writes[0].agent


def test_what_a_kernel_does_not_have_is_said():
    """A script has other kernels, too, which have to continue."""
    x = np.zeros(32, np.uint32)
    wanted = quiet(
        Stop("kernel.py:20", regions=(Region("far", 4096, 2, 2, "f32"),)),
        watches=(
            Watch("global", 512, 4, parameter=0),
            Watch("global", 0, 4, parameter=3),
            Watch("shared", 1 << 20, 4),
        ),
    )
    notes = launch(LOOP, x, inspect=wanted).inspection.notes
    for words in (
        "region far ends at 0x1010",
        "not memory that the kernel may touch",
        "the kernel has 1 parameters",
        "has 1028 bytes",
    ):
        assert sum(words in note for note in notes) == 1, (words, notes)


# -- the last events --------------------------------------------------------------------------

HANG = lined(
    "@3 mov.u32 %r0, %tid.x; setp.gt.u32 %p0, %r0, 31; @%p0 bra END; @4 bar.sync 1, 64; @5 END:"
)


def test_the_last_events_and_histories_are_printed_at_a_fault(capsys):
    wanted = Inspect(last=4, watches=(Watch("shared", 1024, 4),))
    with pytest.raises(ptxemu.Deadlock):
        launch(HANG, np.zeros(4, np.uint32), block=(64,), inspect=wanted)
    told = capsys.readouterr().err
    assert "ptxemu: the last 4 of" in told
    assert "warp 0 of cta(0,0,0): arrives at barrier 1" in told
    assert "writes to shared memory 0x400..0x403 of cta(0,0,0): 0" in told


def test_the_ring_keeps_the_newest_and_names_places():
    d = np.zeros(64, np.uint32)
    report = launch(LOOP, d, block=(64,), inspect=quiet(last=3))
    lines = report.inspection.last_events().splitlines()
    assert lines[0] == "the last 3 of 6 events"
    assert "ran 7 blocks" in lines[1]
    assert "folder/kernel.py:20" in lines[1]
    assert "ended" in lines[-1]


def test_nothing_is_there_where_nothing_is_asked():
    report = launch(LOOP, np.zeros(32, np.uint32))
    assert report.inspection is None
    assert "probed" not in "".join(LOOP.program(None).sources.values())


def test_printf_can_name_who_prints(capsys):
    text = (
        ".global .align 1 .b8 words[4] = {37, 100, 10, 0};\n"
        ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);\n"
    )
    body = """.local .align 8 .b8 frame[8]; .reg .b64 %SP; cvta.local.u64 %SP, frame;
    mov.u32 %r0, %tid.x; setp.ne.u32 %p0, %r0, 33; @%p0 bra END;
    st.u32 [%SP], %r0; mov.u64 %rd0, words; cvta.global.u64 %rd1, %rd0;
    { .param .b64 p0; .param .b64 p1; .param .b32 r0;
    st.param.b64 [p0], %rd1; st.param.b64 [p1], %SP;
    call.uni (r0), vprintf, (p0, p1); }
    END:"""
    module = ptxemu.load(kernel(body, "", text))
    launch(module, block=(64,))
    assert capsys.readouterr().out == "33\n"
    launch(module, block=(64,), name_printf=True)
    assert capsys.readouterr().out == "[warp 1 of cta(0,0,0) lane 1] 33\n"


def test_time_is_said_to_be_nominal_once(capsys):
    cuda_stubs._say_that_time_is_nominal.cache_clear()
    assert cuda_stubs.nominal_time() == cuda_stubs.nominal_time() > 0
    assert capsys.readouterr().err.count("a measured time means nothing") == 1


VALUES = {"step": 3, "warp": 4, "cta": 1, "r7": 0xFFFFFFFF, "f1": 1.5, "lane": np.arange(4)}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("", True),
        ("step==3", True),
        ("step==3 and warp!=4", False),
        ("not step < 2 < warp", True),
        ("s32(%r7) == -1", True),
        ("%r7 > 0", True),
        ("r7 >> 31 & 1", True),
        ("f1 * 2 == 3", True),
        ("%f1 > 1 or nothing", None),  # every name must have a value
        ("lane == 2", True),
        ("all(lane < 3)", False),
        ("f32(0x3fc00000) == %f1", True),
        ("step % 2", True),
        ("step %2 == 1", True),
        ("-step + 3", False),
    ],
)
def test_conditions(text, holds):
    if holds is None:
        with pytest.raises(ValueError, match="unknown name 'nothing'"):
            Condition(text).holds(VALUES)
    else:
        assert Condition(text).holds(VALUES) is holds


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "().__class__",
        "step.real",
        "[x for x in (1,)]",
        "lambda: 1",
        "'a' * 3",
        "step ** 9",
        "open(1)",
        "any(1, 2)",
        "step if warp else 1",
        "(a := 1)",
        "lane[0]",
        "step ==",
        "1" * 2000,
    ],
)
def test_nothing_but_numbers_can_be_said(text):
    with pytest.raises(ValueError, match="condition"):
        Condition(text)


@pytest.mark.parametrize("text", ["1 << 999999999", "step // 0", "f1 & 1", "step << 200"])
def test_what_cannot_be_computed_is_refused(text):
    with pytest.raises(ValueError, match="condition"):
        Condition(text).holds(VALUES)


def test_regions_and_watches_in_words():
    assert Region.parse("A=0x400,128,64,bf16,128B") == Region("A", 1024, 128, 64, "bf16", "128B")
    assert Region.parse("b=0,1,4,u8") == Region("b", 0, 1, 4, "u8")
    assert Watch.parse("smem:1024+16@2") == Watch("shared", 1024, 16, cta=2)
    assert Watch.parse("tmem:0+32@1,0,2") == Watch("tensor", 0, 32, cta=(1, 0, 2))
    assert Watch.parse("param2:8+4") == Watch("global", 8, 4, parameter=2)
    assert Watch.parse("global:0x7000+64") == Watch("global", 0x7000, 64)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Region.parse("A=1,2,3"),
        lambda: Region.parse("A=1,2,x,u8"),
        lambda: Region.parse("A=1,2,3,float"),
        lambda: Region.parse("A=1,2,3,u8,swirl"),
        lambda: Region("A", 0, 0, 3, "u8"),
        lambda: Watch.parse("param:0+4"),
        lambda: Watch.parse("smem1:0+4"),
        lambda: Watch.parse("smem:0"),
        lambda: Watch.parse("heap:0+4"),
        lambda: Watch("tensor", 500, 32),
        lambda: Watch("shared", 0, 0),
        lambda: Stop("kernel.py"),
        lambda: Stop("kernel.py:1", dump=()),
        lambda: Stop("kernel.py:1", dump=("stack",)),
        lambda: Stop("kernel.py:1", limit=0),
        lambda: Stop("kernel.py:1", when="import os"),
        lambda: Inspect(keep=0),
        lambda: Inspect(last=-1),
    ],
)
def test_what_cannot_be_meant_is_refused(wrong):
    with pytest.raises(ValueError, match=r"\w"):
        wrong()


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_inspect_arguments(parser)
    parser.format_help()
    return parser.parse_args(words)


def test_flags_become_a_request():
    flags = "--dump smem,regs --at a.py:7 --at ptx:9 --cta 1,0 --warp 4 --when step==3 --last 9"
    found = inspection_of(parsed(*flags.split(), "--watch", "smem:0+4", "--region", "x=0,1,1,f32"))
    assert [stop.at for stop in found.stops] == ["a.py:7", "ptx:9"]
    stop = found.stops[0]
    assert (stop.dump, stop.cta, stop.warp) == (("smem", "regs"), (1, 0, 0), 4)
    assert (stop.when, stop.regions[0].name) == ("step==3", "x")
    assert (found.last, found.watches, found.folder) == (
        9, (Watch("shared", 0, 4),), "ptxemu_dump",
    )  # fmt: skip
    assert inspection_of(parsed()) is None


@pytest.mark.parametrize("words", [["--dump", "smem"], ["--at", "a.py:7"]])
def test_what_and_where_belong_together(words):
    with pytest.raises(ValueError, match="must be given together"):
        inspecting(parsed(*words))


@pytest.mark.parametrize("words", [["--dump", "heap"], ["--watch", "x"], ["--cta", "a"]])
def test_flags_are_refused_in_words(words, capsys):
    with pytest.raises(SystemExit):
        parsed(*words)
    assert "must be" in capsys.readouterr().err or words[0] == "--watch"


def test_launches_within_are_looked_at(monkeypatch):
    monkeypatch.delenv("CUTE_DSL_LINEINFO", raising=False)
    with inspecting(parsed("--last", "3", "--name-printf")) as report:
        assert os.environ["CUTE_DSL_LINEINFO"] == "1"
        launched = launch(kernel(""))
    assert "CUTE_DSL_LINEINFO" not in os.environ
    assert report.launches == [launched]
    assert "the last 3 of" in launched.inspection.last_events()
    assert launched.options.name_printf
    with inspecting(parsed()):
        assert launch(kernel("")).inspection is None


PAGE = Path(ptxemu.__file__).parent / "inspect" / "README.md"


def test_the_example_of_the_page_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})
    told = capsys.readouterr().out
    assert "5 5" in told
    assert "lanes 5" in told
    assert "x[1] differs: 1 and 0; 30 of 32 elements differ" in told


def test_the_flags_of_the_page_exist():
    parser = argparse.ArgumentParser(add_help=False)
    add_inspect_arguments(parser)
    known = set(re.findall(r"--[a-z-]+", parser.format_help()))
    named = set(re.findall(r"--[a-z][a-z-]*", PAGE.read_text())) - {"--its", "--arguments"}
    assert named <= known


CELLS = ".shared .align 4 .b8 cells[256];\n"


def doubled(factor: int, odd: int | None = None) -> str:
    """d[i] = factor * d[i], plus one for element `odd`, through shared memory."""
    wrong = "" if odd is None else f"setp.eq.u32 %p0, %r0, {odd}; @%p0 add.u32 %r1, %r1, 1;"
    return (
        kernel(
            POINTER
            + f"""ld.global.u32 %r1, [%rd2]; mul.lo.u32 %r1, %r1, {factor}; {wrong}
        mov.u32 %r2, cells; mad.lo.u32 %r2, %r0, 4, %r2;
        .loc 1 11 1
        st.shared.u32 [%r2], %r1;
        .loc 1 12 1
        ld.shared.u32 %r3, [%r2];
        st.global.u32 [%rd2], %r3;""",
            ".param .u64 d",
            CELLS,
        )
        + '\n.file 1 "kernel.py"\n'
    )


RACE = kernel(  # under the adversarial policy the load of warp 0 may come before warp 1's store
    POINTER
    + """setp.lt.u32 %p0, %r0, 32; @%p0 bra READ;
    st.global.u32 [%rd1+128], %r0; bra END;
    READ: ld.global.u32 %r4, [%rd1+128]; st.global.u32 [%rd2], %r4;
    END:""",
    ".param .u64 d",
)


def test_two_functions_differ_in_one_element():
    d = np.arange(32, dtype=np.uint32)
    found = first_difference(
        lambda: launch(doubled(2), d), {"d": d}, other=lambda: launch(doubled(2, odd=9), d)
    )
    assert (found.name, found.index, found.first, found.second) == ("d", (9,), 18, 19)
    assert (found.different, found.size) == (1, 32)
    first, second = found.writes
    assert [write.value.view(np.uint32)[0] for write in (*first, *second)] == [18, 19]
    assert second[-1].lanes == (9,)
    assert second[-1].source == "kernel.py:12"
    assert "d[9] differs: 18 and 19" in str(found)
    np.testing.assert_array_equal(d, 2 * np.arange(32))  # results of the first run


def test_equal_runs_have_no_difference():
    d = np.arange(32, dtype=np.uint32)
    for policy in ("random", "adversarial"):
        found = first_difference(lambda: launch(doubled(3), d), {"d": d}, second={"policy": policy})
        assert found is None


def test_policies_that_differ():
    d = np.zeros(64, np.uint32)
    seeds = [
        first_difference(
            lambda: launch(RACE, d, block=(64,)),
            {"d": d},
            second={"policy": "random", "seed": seed},
        )
        for seed in range(8)
    ]
    found = next(filter(None, seeds))
    assert found.index == (0,)
    assert {int(found.first), int(found.second)} == {0, 63}


def test_a_reference_and_a_tolerance():
    d = np.arange(32, dtype=np.uint32)

    def reference() -> dict[str, np.ndarray]:
        return {"d": 2 * d}

    assert first_difference(lambda: launch(doubled(2), d), {"d": d}, reference=reference) is None
    d[:] = np.arange(32)
    run = lambda: launch(doubled(2, odd=5), d)  # noqa: E731
    found = first_difference(run, {"d": d}, reference=reference)
    assert (found.index, found.first, found.second, found.writes[1]) == ((5,), 11, 10, ())
    d[:] = np.arange(32)
    assert first_difference(run, {"d": d}, reference=reference, tolerance=1.0) is None
    with pytest.raises(ValueError, match="shape"):
        first_difference(run, {"d": d}, reference={"d": d[:3]})
    with pytest.raises(ValueError, match="the tensors are d"):
        first_difference(run, {"d": d}, reference={"e": d})


def test_tiles_differ_at_a_line():
    d = np.arange(32, dtype=np.uint32)
    stop = Stop("kernel.py:12", dump=("smem",), regions=(Region("cells", 1024, 2, 16, "u32"),))
    found = first_tile_difference(
        lambda: launch(doubled(2), d),
        stop,
        {"d": d},
        other=lambda: launch(doubled(2, odd=20), d),
    )
    assert (found.name, found.index, found.first, found.second) == ("cells", (1, 4), 40, 41)
    assert found.moment == (0, 0, 0)
    assert found.writes[1][-1].source == "kernel.py:11"
    assert "at step 0, CTA 0, warp 0" in str(found)
    assert first_tile_difference(lambda: launch(doubled(2), d), stop, {"d": d}) is None
    with pytest.raises(ValueError, match=r"no stop at kernel\.py:99 in both runs: 0"):
        first_tile_difference(lambda: launch(doubled(2), d), Stop("kernel.py:99"), {"d": d})


def test_tensors_of_torch_and_views_of_numpy():
    torch = pytest.importorskip("torch")
    x = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    for tensor, values in ((x, x.float()), (x.T, x.T.float()), (x[1:, ::2], x[1:, ::2].float())):
        held = HostTensor(tensor)
        np.testing.assert_array_equal(held.values(held.bits), values.numpy())
    held = HostTensor(x[1:, ::2])
    assert held.address_of((1, 1)) == x[2, 2:].data_ptr()
    assert held.extent == 2 * 7
    y = np.arange(12, dtype=np.int16).reshape(3, 4)[1:, 1::2]
    held = HostTensor(y)
    np.testing.assert_array_equal(held.values(held.bits), y)
    held.bits[0, 0] = 77
    assert y[0, 0] == 77
    with pytest.raises(ValueError, match="complex"):
        HostTensor(np.zeros(3, np.complex64))
