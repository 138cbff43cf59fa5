"""Data kept on disk about a PTX text equals what a new computation gives, or is not used."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ptxemu
from ptxemu import kept as on_disk
from ptxemu.codegen.program import Program
from ptxemu.guard import CacheWarning
from ptxemu.module import Module, load
from ptxemu.plain import Codec, NotPlain
from ptxemu.syntax import parser
from ptxemu.syntax.tree import Imm, Reg, Vec
from tests.ptxemu.kernels import HEAD

BODY = """
.visible .entry kernel(.param .u64 out) {
    .reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %rd<4>; .reg .f32 %f<3>;
    .shared .align 16 .b8 tile[256];
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    setp.lt.u32 %p1, %r1, 7;
    mov.b32 %r2, 1;
    @%p1 bra FEW;
    shl.b32 %r2, %r1, 2;
    mov.u32 %r3, tile;
    st.shared.b32 [%r3+4], %r2;
FEW:
    {
        .reg .b32 %r<2>;
        cvt.rn.f32.u32 %f1, %r1;
        mul.f32 %f2, %f1, 0f3F000000;
        mov.b32 %r1, %f2;
    }
    @!%p1 add.u32 %r2, %r2, 1;
    st.global.u32 [%rd3], %r2;
    unknown.thing %r2;
    ret;
}
"""
PTX = HEAD + "// what makes the text long\n" * 200 + BODY
RUNS = PTX.replace("    unknown.thing %r2;\n", "")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "kept"
    monkeypatch.setenv(on_disk.FOLDER, str(found))
    monkeypatch.setattr(on_disk, "_sources", lambda: b"these sources")
    return found


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the parsed texts."""
    texts: list[str] = []

    def parse(text: str) -> object:
        texts.append(text)
        return parser.parse(text)

    monkeypatch.setattr("ptxemu.module.parse", parse)
    return texts


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*"))


def launched(module: Module, check: bool = False) -> list[int]:
    out = np.zeros(32, np.uint32)
    address = out.ctypes.data.to_bytes(8, "little")
    options = ptxemu.Options(check=check)
    module.launch(grid=(1,), block=(32,), params=[address], memory=[out], options=options)
    return out.tolist()


def everything(module: Module) -> dict[str, Any]:
    program = module.program(None, late=True, checked=True)
    with pytest.raises(ptxemu.UnsupportedPtx) as raised:
        launched(module)
    program.version(0, 0, frozenset())
    analysis = vars(program.analysis) | {"registers": vars(program.registers)}
    return {
        "tree": module.tree,
        "analysis": analysis,
        "blocks": [replace(block, steps=[]) for block in program.blocks],
        "sites": [(instr, instr.parts, program.site_of[id(instr)]) for instr in program.sites],
        "initial": [repr(value) for value in program.initial],
        "sources": program.sources,
        "error": str(raised.value),
    }


def test_a_second_module_is_equal_to_the_first(folder: Path, parsed: list[str]) -> None:
    first, second = everything(load(PTX)), everything(load(PTX))
    assert parsed == [PTX]
    assert "line 2" in first["error"]
    for name, found in first.items():
        assert found == second[name], name


def test_all_programs_of_an_entry_share_an_analysis(folder: Path) -> None:
    module = load(RUNS)
    assert module.program(None).analysis is module.program(None, checked=True).analysis
    assert load(RUNS).program(None).analysis is not module.program(None).analysis


def generated(program: Program) -> list[object]:
    """Everything known about generated code, except the line numbers without instructions."""
    codes = {key: found.__code__ for key, found in program.versions.items()}
    sites = {file: [i and program.site_of[id(i)] for i in of] for file, of in program.lines.items()}
    words = sorted(words.tobytes() for words in program.frame._words) if program.frame else None
    lines = {key: (code.co_code, list(code.co_lines())) for key, code in codes.items()}
    return [program.sources, sites, program.steps, lines, program.flows, words]


@pytest.mark.parametrize("check", [False, True])
def test_results_and_generated_code_are_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, check: bool
) -> None:
    module = load(RUNS)
    assert launched(module, check) == [1] * 7 + [4 * n + 1 for n in range(7, 32)]
    monkeypatch.setattr(Program, "_generated", lambda *_: pytest.fail("generated anew"))
    again = load(RUNS)
    assert launched(again, check) == launched(module, check)
    programs = [m.program(None, late=check, checked=check) for m in (module, again)]
    if not check:  # the functions are those of another module then
        assert generated(programs[0]) == generated(programs[1])
    assert programs[0].sources == programs[1].sources


def test_blocks_in_another_order_have_their_own_constants(folder: Path) -> None:
    order = list(range(len(load(RUNS).program(None).blocks)))
    results = []
    for blocks in (order, order[::-1], order[::-1]):
        module = load(RUNS)
        program = module.program(None)
        for block in blocks:
            program.version(block, 0, frozenset())
        results.append(launched(module))
    assert results[0] == results[1] == results[2]


def test_the_second_form_of_a_block_is_kept(folder: Path) -> None:
    flows = []
    for _ in range(2):
        module = load(RUNS)
        program = module.program(None, late=True, checked=True)
        program.tainted((0, 0, frozenset()))
        module._note_versions(program)
        flows.append(program.flows)
        assert all(flow.instr is program.sites[site] for site, flow in program.flows.items())
    assert flows[0] == flows[1]
    assert flows[0]
    assert program.fresh == 0


def test_an_error_names_its_line(folder: Path) -> None:
    errors = []
    for _ in range(2):
        module = load(RUNS)
        launched(module)
        with pytest.raises(ptxemu.OutOfBounds) as raised:
            module.launch(grid=(1,), block=(32,), params=[bytes(8)], memory=[])
        errors.append(str(raised.value))
    assert errors[0] == errors[1]
    assert "st.global.u32 [%rd3], %r2;" in errors[0]


def test_addresses_of_this_process_are_not_kept(folder: Path) -> None:
    text = RUNS.replace(".visible", ".global .b32 word = 5;\n.visible", 1)
    text = text.replace("mov.b32 %r2, 1;", "ld.global.b32 %r2, [word];")
    modules = [load(text) for _ in range(2)]
    assert [launched(module)[0] for module in modules] == [5, 5]
    assert not any(module.program(None).keeps for module in modules)


def _file(content: bytes) -> bytes:
    """Return the content of a file, with its digest."""
    return hashlib.sha256(content).digest() + content


class Harm:
    """An example of what a pickle could do: call any function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (3,)


@pytest.mark.parametrize(
    "damage",
    [
        *(b"", b"x", bytes(64), b"longer" * 9, bytes(32) + zlib.compress(b"PTX")),
        *(_file(b""), _file(b"PTX"), _file(zlib.compress(b"")), _file(zlib.compress(bytes(64)))),
        _file(zlib.compress(pickle.dumps(Harm()))),
    ],
)
def test_a_damaged_file_is_made_anew(folder: Path, parsed: list[str], damage: bytes) -> None:
    whole = launched(load(RUNS))
    for path in files(folder):
        path.write_bytes(damage)
    assert launched(load(RUNS)) == whole
    assert launched(load(RUNS)) == whole
    assert len(parsed) == 2


def test_a_file_cut_short_is_made_anew(folder: Path, parsed: list[str]) -> None:
    load(RUNS)
    (path,) = files(folder)
    path.write_bytes(path.read_bytes()[:-1])
    assert launched(load(RUNS))
    assert len(parsed) == 2


def test_other_sources_find_nothing(
    folder: Path, parsed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(RUNS)
    monkeypatch.setattr(on_disk, "_sources", lambda: b"other sources")
    load(RUNS)
    monkeypatch.setattr(on_disk, "_sources", lambda: b"")  # newer than the process
    load(RUNS)
    assert len(parsed) == 3
    assert len(files(folder)) == 2


def test_sources_newer_than_the_process_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = on_disk._sources.__wrapped__
    monkeypatch.setattr(on_disk, "_STARTED", float("inf"))
    assert len(digest()) == 32
    assert digest() == digest()
    monkeypatch.setattr(on_disk, "_STARTED", 0.0)
    assert digest() == b""


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners of files")
@pytest.mark.parametrize("which", ["folder", "file"])
def test_what_others_may_write_is_not_read(folder: Path, parsed: list[str], which: str) -> None:
    load(RUNS)
    (path,) = files(folder)
    (folder if which == "folder" else path).chmod(0o777)
    with pytest.warns(CacheWarning, match="may be written by other users"):
        load(RUNS)
    assert len(parsed) == 2


def test_a_folder_that_cannot_be_made_is_no_error(
    tmp_path: Path, parsed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(on_disk.FOLDER, str(tmp_path / "file" / "kept"))
    assert launched(load(RUNS)) == launched(load(RUNS))
    assert len(parsed) == 2


@pytest.mark.parametrize("how", ["off", "short", "module"])
def test_nothing_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "off":
        monkeypatch.setenv(on_disk.FOLDER, "off")
    text = HEAD + BODY if how == "short" else PTX
    Module(text) if how == "module" else load(text)
    assert not folder.exists()


def test_what_was_used_least_recently_goes(folder: Path) -> None:
    for number in range(4):
        on_disk.Kept(folder, "text", b"").put(str(number), "x" * number)
    paths = {n: on_disk.Kept(folder, "text", b"")._path(str(n)) for n in range(4)}
    for n, age in ((0, 40), (1, 10), (2, 30), (3, 20)):
        os.utime(paths[n], (1e9 - age, 1e9 - age))
    foreign = [folder / "aa" / "a file of somebody", folder / "photos" / ("0" * 62)]
    draft = folder / "aa" / f".new-1-2-{'0' * 62}"
    for path in (*foreign, draft):
        path.parent.mkdir(exist_ok=True)
        path.write_text("x" * 1000)
        os.utime(path, (1e9, 1e9))
    room = paths[1].stat().st_size + paths[3].stat().st_size
    on_disk.evict(folder, room)
    assert {n for n in range(4) if paths[n].exists()} == {1, 3}
    assert [path.exists() for path in (*foreign, draft)] == [True, True, False]


@dataclass
class Node:
    """Two fields, one of which is no argument of the constructor."""

    name: str
    items: list[Any]


class Plain:
    """Attributes without a dataclass; `other` is not kept."""

    PLAIN = ("value",)

    def __init__(self, value: object) -> None:
        self.value, self.other = value, value


KNOWN = {
    *(type(None), bool, int, float, str, bytes, tuple, list, set, frozenset, dict, range),
    *(Node, Plain, Reg, Imm, Vec),
}
CODEC = Codec((Node, Plain, Reg, Imm, Vec))
VALUES = [
    *(None, True, 0, -1, 2**80, 1.5, float("inf"), -0.0, "", "word \ud800 \0", b"", b"\0\xff"),
    *((), [], set(), frozenset(), {}, range(3), range(9, 1, -2)),
    *([1, 2, -3], [2**31, 1], [True, 1, 1.0], (1, (2, [3, "x"])), {1: "a", "1": [], (1,): None}),
    *({1, "a", (2,)}, frozenset({b"x"}), [[], [], ()], [{"x"}, {"x"}]),
    *(Node("n", [Node("m", [1])]), Vec((Reg("%r1"), None, Imm(1.0, 32), Imm(1)))),
    [set(map(str, range(n, n + 20))) for n in range(9)],  # each nearly equal to the one before
    [frozenset(map(str, range(n, n + 20))) for n in (0, 1, 1, 7)],
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=[type(value).__name__ for value in VALUES])
def test_it_comes_back(value: Any) -> None:
    again = CODEC.loads(CODEC.dumps(value))
    assert repr(again) == repr(value) or again == value
    assert _types(again) == _types(value)


def _classes(value: Any) -> Iterator[type]:
    """Yield the classes of a value and of everything inside it."""
    yield type(value)
    inside: Any = value if isinstance(value, tuple | list | set | frozenset) else ()
    if isinstance(value, dict):
        inside = [*value, *value.values()]
    for item in (*inside, *getattr(value, "__dict__", {}).values()):
        yield from _classes(item)


def _types(value: Any) -> Any:
    if isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, tuple | list):
        return type(value), [_types(item) for item in value]
    return type(value)


def test_one_object_stays_one() -> None:
    """Two equal mutable objects stay two."""
    node, names = Node("n", []), {"%r1"}
    first, second, third, fourth = CODEC.loads(CODEC.dumps([node, node, Node("n", []), names]))
    assert first is second
    assert first == third is not first
    assert fourth == names


def test_what_is_not_named_is_not_kept() -> None:
    again = CODEC.loads(CODEC.dumps(Plain((1, "x"))))
    assert vars(again) == {"value": (1, "x")}


@pytest.mark.parametrize("value", [object(), len, [Callable], {1: {2}, 3: complex(1)}, Node])
def test_other_classes_are_refused(value: Any) -> None:
    with pytest.raises(NotPlain):
        CODEC.dumps(value)


def test_equal_values_give_equal_bytes() -> None:
    sets = [{str(n) for n in order} for order in (range(50), reversed(range(50)))]
    assert CODEC.dumps(sets[0]) == CODEC.dumps(sets[1])


def test_a_pickle_is_no_text() -> None:
    with pytest.raises(ValueError, match="not plain objects"):
        CODEC.loads(pickle.dumps([1, 2, 3]))


@pytest.mark.parametrize("seed", range(20))
def test_damage_raises_or_gives_known_objects(seed: int) -> None:
    """Every byte of a small text is changed, and the text is cut there."""
    whole = CODEC.dumps(VALUES[seed:])
    order = random.Random(seed)
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] = order.randrange(256)
        for damaged in (bytes(data), bytes(data[:at])):
            with contextlib.suppress(ValueError):
                assert {*_classes(CODEC.loads(damaged))} <= KNOWN
