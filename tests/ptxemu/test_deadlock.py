"""A deadlock report explains which warp waits for which, what is missing, and the likely
mistake.
"""

from __future__ import annotations

import pickle
import re
import runpy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from lab.silicon.conformance.ptx_program import POLICIES, aligned_copy
from ptxemu import Deadlock
from ptxemu.check import text as kept
from ptxemu.commands.run import report_alone
from tests.ptxemu.kernels import kernel, launch, pointers

SHARED = """.shared .align 128 .b8 tile[1024];
.shared .align 8 .b64 full[2];
.shared .align 8 .b64 empty[2];
"""
START = """ld.param.u64 %rd1, [d];
mov.u32 %r0, %tid.x;
shr.u32 %r1, %r0, 5;
setp.ne.u32 %p1, %r0, 0;
@%p1 bra READY;
mbarrier.init.shared.b64 [full], {full};
mbarrier.init.shared.b64 [full+8], {full};
mbarrier.init.shared.b64 [empty], {empty};
mbarrier.init.shared.b64 [empty+8], {empty};
READY:
bar.sync 0;
and.b32 %r2, %r0, 31;
setp.eq.u32 %p2, %r2, 0;
setp.eq.u32 %p3, %r1, 0;
@%p3 bra PRODUCER;
"""
COPY = (
    "@%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[tile], [%rd1], 128, [{}];\n"
)
ANNOUNCE = "@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [{}], {};\n"
ARRIVE = "@%p2 mbarrier.arrive.shared.b64 _, [{}];\n"


def wait(barrier: str, parity: str | int, label: str) -> str:
    return (
        f"{label}:\nmbarrier.try_wait.parity.shared.b64 %p0, [{barrier}], {parity};\n"
        f"@!%p0 bra {label};\n"
    )


def roles(consumer: str, producer: str, *, full: int = 1, empty: int = 1) -> str:
    """Warp 0 produces; all others consume."""
    start = START.format(full=full, empty=empty)
    return f"{start}{consumer}bra DONE;\nPRODUCER:\n{producer}DONE:\n"


def ring(
    *,
    first: int = 1,
    release: str = ARRIVE.format("%r6"),
    announce: str = ANNOUNCE.format("%r5", 128),
    acquire: bool = True,
    waits: tuple[str, str] = ("%r5", "%r7"),
    before: str = "",
    more: str = "",
    **counts: int,
) -> str:
    """Five tiles through two stages, each released by the consumer. %r3 is the tile, %r4 the
    stage's offset, %r5 and %r6 are its barriers, %r7 is the parity of its phase.

    Args:
        acquire: Whether the producer waits.
        waits: Barrier and parity of the consumer's wait.
        before: Code of the consumer before that wait.
        more: Code of the producer after its copy.
    """
    step = """and.b32 %r4, %r3, 1;
shl.b32 %r4, %r4, 3;
mov.u32 %r5, full;
add.u32 %r5, %r5, %r4;
mov.u32 %r6, empty;
add.u32 %r6, %r6, %r4;
shr.u32 %r7, %r3, 1;
and.b32 %r7, %r7, 1;
"""
    again = "add.u32 %r3, %r3, 1;\nsetp.lt.u32 %p4, %r3, 5;\n@%p4 bra {};\n"
    free = wait("%r6", "%r8", "WE") if acquire else ""
    produce = (
        f"mov.u32 %r3, 0;\nP:\n{step}xor.b32 %r8, %r7, {first};\n{free}"
        f"{announce}{COPY.format('%r5')}{more}{again.format('P')}"
    )
    consume = f"mov.u32 %r3, 0;\nC:\n{step}{before}{wait(*waits, 'WF')}{release}{again.format('C')}"
    return roles(consume, produce, **counts)


@dataclass(frozen=True)
class Bug:
    """A kernel, and text that its report has to contain."""

    body: str
    says: tuple[str, ...]
    never: tuple[str, ...] = ()
    threads: int = 64
    ctas: int = 1
    cluster: int = 1


BOTH = ANNOUNCE.format("full", 128) + COPY.format("full")
BUGS = {
    "twice the bytes": Bug(
        ring(announce=ANNOUNCE.format("%r5", 256)),
        (
            "likely cause: wrong transaction bytes on mbarrier full (0x800): expect_tx announces "
            "256 bytes, twice the 128 bytes that the copies bring",
            "it still expects 128 bytes: 256 were announced with expect_tx, 128 came",
            "got its one arrival",
            "warp 1 of cta(0,0,0) waits",
            "mbarrier full (0x",
        ),
    ),
    "half the bytes": Bug(
        ring(announce=ANNOUNCE.format("%r5", 64)),
        (
            "announces 64 bytes, half of the 128 bytes that the copies bring",
            "64 bytes more came than were announced",
        ),
    ),
    "no copy": Bug(
        roles(wait("full", 0, "W"), ANNOUNCE.format("full", 128)),
        ("no copy completes on it: 128 bytes were announced", "128 were announced", "none came"),
    ),
    "no acquire": Bug(
        roles(wait("full", 0, "V") + ARRIVE.format("empty"), COPY.format("full")),
        (
            "likely cause: the acquire is missing: 128 bytes have come to mbarrier full (0x800)",
            "nobody has announced them there with arrive.expect_tx",
        ),
        ("wrong parity", "the signal is missing"),
    ),
    "release missing": Bug(
        ring(release=""),
        (
            "cycle|chain",
            "waits for phase 0 of mbarrier empty (0x",
            "the signal is missing: no instruction of the program arrives on mbarrier empty",
            "got 0 of 1: 1 of 1 arrivals is missing",
        ),
    ),
    "release under a condition": Bug(
        ring(release=f"setp.gt.u32 %p5, %r0, 99;\n@!%p5 bra C2;\n{ARRIVE.format('%r6')}C2:\n"),
        ("cycle: ", "the signal was skipped: warp 1", "was never executed", "could signal it"),
    ),
    "too few warps": Bug(
        roles(ARRIVE.format("empty"), wait("empty", 0, "W"), empty=4),
        (
            "fewer threads arrive than are counted: the barrier was initialised with a count of 4",
            "got 3 of 4: 1 of 4 arrivals is missing",
            "warps 1-3",
        ),
        threads=128,
    ),
    "one lane of each warp": Bug(
        roles(ARRIVE.format("empty"), wait("empty", 0, "W"), empty=96),
        ("one lane arrives where the count is of whole warps", "count of 96", "initialise with 3"),
        threads=128,
    ),
    "off by one": Bug(
        roles(
            "setp.eq.u32 %p5, %r1, 2;\n@%p5 bra SECOND;\n"
            + wait("full", 0, "V")
            + ARRIVE.format("empty")
            + "bra DONE;\nSECOND:\n"
            + wait("empty", 0, "U")
            + wait("full", 1, "W"),
            BOTH,
        ),
        ("wrong parity, off by one: warp 2", "phase 0 is complete", "waits for phase 1"),
        ("missing: no instruction",),
        threads=96,
    ),
    "nobody first": Bug(
        ring(first=0),
        ("cycle: ", "wrong parity at the start", "as above", "parity 1, which passes on a fresh"),
    ),
    "nobody first, of one": Bug(
        roles("", wait("empty", 0, "U") + BOTH + wait("full", 0, "V") + ARRIVE.format("empty")),
        ("cycle: warp 0", "wrong parity at the start", "parity 1, which passes on a fresh"),
    ),
    "a count that is too small": Bug(
        roles(
            ARRIVE.format("empty") + ARRIVE.format("full"),
            wait("full", 0, "U") + wait("empty", 0, "W"),
            full=2,
        ),
        (
            "the barrier went on without its waiters: phases 0 to 1 of mbarrier empty",
            "its count is 1, but warp 1 and warp 2 of cta(0,0,0) arrive 2 times in a round",
        ),
        ("wrong parity",),
        threads=96,
    ),
    "only the first CTA": Bug(
        roles(
            "mov.u32 %r9, %cluster_ctarank;\nsetp.ne.u32 %p5, %r9, 0;\n@%p5 bra DONE;\n"
            + ARRIVE.format("full"),
            wait("full", 0, "W"),
        )
        + "barrier.cluster.arrive;\nbarrier.cluster.wait;\n",
        (
            "the signal goes to another CTA: PTX line",
            "arrives on mbarrier full (0x800) of cta(0,0,0), and never that of cta(1,0,0)",
        ),
        ctas=2,
        cluster=2,
    ),
    "beside a ring": Bug(
        roles(
            "and.b32 %r4, %r1, 1;\nshl.b32 %r4, %r4, 3;\nmov.u32 %r5, full;\n"
            "add.u32 %r5, %r5, %r4;\n" + ARRIVE.format("%r5") + wait("%r5", 0, "V"),
            wait("empty", 0, "W"),
        ),
        ("no instruction of the program arrives on mbarrier empty",),
        ("could signal it",),
    ),
    "roles one behind the other": Bug(
        roles(  # the second half is missing from warp 2, but the first half could get there
            "setp.eq.u32 %p5, %r1, 2;\n@%p5 bra SECOND;\n"
            + wait("full", 0, "V")
            + wait("full", 1, "X")
            + "SECOND:\n"
            + wait("empty", 0, "U")
            + wait("empty", 1, "Y")
            + ARRIVE.format("full"),
            BOTH + ARRIVE.format("empty") + wait("empty+8", 0, "W") + BOTH + ARRIVE.format("empty"),
        ),
        ("chain: warp 1 waits for phase 1 of mbarrier full (0x800) from warp 0",),
        ("from warp 2",),
        threads=96,
    ),
    "others wait, too": Bug(
        roles(
            "setp.eq.u32 %p5, %r1, 2;\n@%p5 bra SECOND;\n"
            + ARRIVE.format("full")
            + wait("empty", 0, "V")
            + "bra DONE;\nSECOND:\n"
            + wait("empty+8", 0, "U")
            + ARRIVE.format("full"),
            wait("full", 0, "W") + ARRIVE.format("empty") + ARRIVE.format("empty+8"),
            full=2,
        ),
        ("cycle: ", "initialised with a count of 2, and only warp 1 of cta(0,0,0) arrived (1)"),
        threads=96,
    ),
    "a signal behind a wait": Bug(
        roles(
            "setp.eq.u32 %p5, %r1, 2;\n@%p5 bra SECOND;\n"
            + wait("full", 0, "V")
            + "SECOND:\n"
            + ARRIVE.format("empty"),
            wait("empty", 0, "U") + ARRIVE.format("full"),
            empty=2,
        ),
        (
            "would first signal mbarrier full (0x800) at PTX line",
            "after the wait for phase 0 of mbarrier empty",
            "a signal before that wait is missing",
        ),
        threads=96,
    ),
    "the other stage": Bug(
        roles(  # warp 1 arrives on empty+8 instead of empty, the second time
            "setp.eq.u32 %p5, %r1, 2;\n@%p5 bra SECOND;\n"
            + ARRIVE.format("empty")
            + wait("full", 0, "V")
            + ARRIVE.format("empty+8")
            + wait("full", 1, "X")
            + "bra DONE;\nSECOND:\n"
            + ARRIVE.format("empty")
            + wait("full", 0, "Y")
            + ARRIVE.format("empty"),
            wait("empty", 0, "U") + BOTH + wait("empty", 1, "W") + BOTH + ARRIVE.format("empty"),
            empty=2,
        ),
        (
            "warp 1 of cta(0,0,0) arrived on mbarrier empty (0x810) in phases before, at PTX line",
            "and not in phase 1, to which warp 2 of cta(0,0,0) came: an arrival was skipped, or",
        ),
        threads=96,
    ),
    "code of another role": Bug(
        roles(  # according to the text warp 1 could reach the code after SECOND
            "setp.eq.u32 %p5, %r1, 2;\n@%p5 bra SECOND;\n"
            + wait("full+8", 0, "V")
            + "@!%p5 bra DONE;\nSECOND:\n"
            + wait("full", 0, "X")
            + wait("full+8", 0, "Y")
            + ARRIVE.format("empty+8"),
            BOTH + wait("empty+8", 0, "U"),
        ),
        ("chain: warp 0", "from warp 2, which waits for phase 0 of mbarrier full"),
        ("can still come from warp 1",),
        threads=96,
    ),
    "exited": Bug(
        roles(wait("full", 0, "V") + wait("full", 1, "W"), BOTH),
        ("phase 1 of mbarrier full", "warp 0", "has exited", "exited while others still wait"),
    ),
    "named barrier": Bug(
        roles("setp.eq.u32 %p5, %r1, 3;\n@%p5 bra DONE;\nbar.sync 2, 96;\n", ""),
        ("barrier 2 counts 96 threads and only 64 come", "warp 1 and warp 2", "exited without it"),
        threads=128,
    ),
    "two named barriers": Bug(
        roles("bar.sync 2, 128;\n", "bar.sync 1, 128;\n"),
        (
            "likely cause: barrier 2 counts 128 threads and only 96 come; others wait at another",
            "barrier.arrive before a warp's own wait was left out",
        ),
        ("likely cause: barrier 1",),  # reported once
        threads=128,
    ),
    "cluster barrier": Bug(
        roles(
            "",
            "mov.u32 %r9, %cluster_ctarank;\nsetp.eq.u32 %p5, %r9, 1;\n@!%p5 bra MEET;\n"
            + wait("full", 0, "W")
            + "MEET:\n",
        )
        + "barrier.cluster.arrive;\nbarrier.cluster.wait;\n",
        ("the cluster barrier", "cta(1,0,0)", "the signal is missing", "mbarrier full"),
        ctas=2,
        cluster=2,
    ),
    "a chain of three": Bug(
        roles(
            "setp.eq.u32 %p5, %r1, 2;\n@%p5 bra SECOND;\n"
            + wait("full", 0, "V")
            + ARRIVE.format("empty")
            + "bra DONE;\nSECOND:\n"
            + wait("empty", 0, "W"),
            wait("empty+8", 0, "U") + BOTH,
        ),
        ("chain: warp 2", "from warp 1", "from warp 0", "from nobody"),
        threads=96,
    ),
    "many CTAs": Bug(
        roles(wait("full", 0, "W"), ""), ("warps 1-3", "all 2 CTAs"), threads=128, ctas=2
    ),
}


PAIR = """mov.u32 %r9, %cluster_ctarank;
setp.eq.u32 %p5, %r9, 0;
"""
MULTICAST = (
    "@%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
    "[{}], [%rd1], 64, [full], {};\n"
)


def halves(mask: str = "3", expect: int = 128, *, whole: bool = True) -> str:
    """Each CTA of a pair copies half of the tile into both, and releases the tile to both.

    Args:
        mask: CTAs into which CTA 0 copies.
        whole: Whether CTA 1 copies, too.
    """
    skip = "" if whole else "@!%p5 bra E;\n"
    produce = (
        f"{PAIR}selp.u32 %r10, {mask}, 3, %p5;\ncvt.u16.u32 %h1, %r10;\nmov.u32 %r11, tile;\n"
        f"mad.lo.u32 %r11, %r9, 64, %r11;\n{ANNOUNCE.format('full', expect)}{skip}"
        f"{MULTICAST.format('%r11', '%h1')}E:\n{wait('empty', 0, 'WE')}"
    )
    tell = "".join(
        f"mapa.shared::cluster.u32 %r12, empty, {rank};\n"
        "@%p2 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r12];\n"
        for rank in (0, 1)
    )
    return (
        roles(wait("full", 0, "WF") + tell, produce, empty=2).replace(
            "bar.sync 0;", "barrier.cluster.arrive;\nbarrier.cluster.wait;"
        )
        + "barrier.cluster.arrive;\nbarrier.cluster.wait;\n"
    )


_SKIP = "setp.eq.u32 %p5, %r1, 2;\nsetp.eq.u32 %p6, %r3, 2;\nand.pred %p5, %p5, %p6;\n"
BUGS |= {
    "a signal of one's own that is missing": Bug(
        roles("", wait("full", 0, "U") + ARRIVE.format("full") + wait("full", 1, "V")),
        ("no signal before the wait: phase 0 of mbarrier full", "an arrive, a copy or a commit"),
    ),
    "a copy that is never issued": Bug(
        ring(
            announce=ANNOUNCE.format("%r5", 256),
            more=f"setp.gt.u32 %p5, %r3, 99;\n@!%p5 bra NC;\n{COPY.format('%r5')}NC:\n",
        ),
        ("or issue the missing copy (PTX line 67 was never executed)",),
    ),
    "bytes that the waiting warps could bring": Bug(
        "setp.eq.u32 %p2, %tid.x, 0;\n@%p2 mbarrier.init.shared.b64 [full], 1;\nbar.sync 0;\n"
        f"ld.param.u64 %rd1, [d];\nmov.u32 %r7, 0;\nL:\n{ANNOUNCE.format('full', 256)}"
        f"{COPY.format('full')}{wait('full', '%r7', 'W')}"
        "bar.sync 0;\nxor.b32 %r7, %r7, 1;\nsetp.eq.u32 %p4, %r7, 1;\n@%p4 bra L;\n",
        ("likely cause: wrong transaction bytes on mbarrier full (0x800): expect_tx announces",),
    ),
    "the wrong barrier": Bug(
        ring(waits=("%r6", "%r7")),
        ("the wrong barrier: warp 1 of cta(0,0,0) waits for phase 0 of mbarrier empty (0x810)",),
        ("wrong parity",),
    ),
    "an early exit of one consumer": Bug(
        ring(before=f"{_SKIP}@%p5 bra DONE;\n", empty=2),
        ("arrived (1); warp 2 of cta(0,0,0) arrived in phases before, and exited",),
        threads=96,
    ),
    "a count that explains what was skipped": Bug(
        ring(full=2),
        ("fewer threads arrive than are counted: the barrier was initialised with a count of 2",),
        ("an arrival was skipped",),
    ),
    "a mask that leaves out a CTA": Bug(
        halves(mask="1"),
        ("came from cta(1,0,0) alone: does the mask of cta(0,0,0) name this CTA?",),
        ("fewer threads",),
        ctas=2,
        cluster=2,
    ),
    "a half that nobody copies": Bug(
        halves(whole=False),
        ("likely cause: wrong transaction bytes on mbarrier full (0x800): expect_tx announces",),
        ctas=2,
        cluster=2,
    ),
}
# What only a checked launch knows, and what is no deadlock under every schedule.
SLIPS = {
    "no expect_tx": Bug(
        ring(announce=ARRIVE.format("%r5")),
        ("no expect_tx: 256 bytes have come to mbarrier full (0x800) in phase 1",),
    ),
    "a parity of the consumer that never changes": Bug(
        ring(waits=("%r5", "0")),
        (
            "a wait that passed twice: warp 1 of cta(0,0,0) found phase 0 of mbarrier full (0x800)"
            " complete at PTX line",
            "so it did not wait for phase 1: the parity has to change with every phase",
        ),
    ),
    "a parity of the producer that never changes": Bug(
        ring().replace("xor.b32 %r8, %r7, 1;", "mov.u32 %r8, 1;"),
        ("went on at PTX line 61 twice though no phase of mbarrier empty (0x810) was complete",),
    ),
    "no wait for a free slot": Bug(
        ring(acquire=False),
        (
            "mbarrier full (0x800) went on without its waiter: warp 1 of cta(0,0,0) found phase 2",
            "never saw phases 0 to 1: whoever signals it did not wait for that",
        ),
    ),
}


def report_of(bug: Bug, policy: str = "round-robin", **how: object) -> str:
    data = aligned_copy(np.zeros(64, np.uint32))
    text = kernel(bug.body, ".param .u64 d", SHARED)
    how |= {"grid": (bug.ctas,), "cluster": (bug.cluster,), "block": (bug.threads,)}
    with pytest.raises(Deadlock) as caught:
        launch(text, params=pointers(data), memory=[data], policy=policy, **how)
    return str(caught.value)


@pytest.mark.parametrize("name", BUGS)
def test_a_report_names_the_cause_under_every_schedule(name: str) -> None:
    bug = BUGS[name]
    text = report_of(bug)
    for part in bug.says:
        assert any(each in text for each in part.split("|")), f"{part!r} is not in\n{text}"
    for part in bug.never:
        assert part not in text
    assert "Traceback" not in text
    for policy in POLICIES[1:]:
        for seed in (0, 1):
            assert report_of(bug, policy, seed=seed) == text


@pytest.mark.parametrize("name", SLIPS)
def test_a_checked_launch_names_the_wait_that_came_too_early(name: str) -> None:
    bug = SLIPS[name]
    text = report_of(bug, check=True)
    assert all(part in text.partition("likely cause: ")[2].partition("\n")[0] for part in bug.says)


def test_names_stand_for_symbols_and_addresses() -> None:
    bug = BUGS["a chain of three"]
    text = report_of(bug, names={"full": "Q", "empty+8": "release", 0x810: "S"}, roles={1: "load"})
    for part in ("mbarrier Q (0x800)", "mbarrier release (0x818)", "mbarrier S (0x810)", "(load)"):
        assert part in text


def test_the_ptx_is_kept_where_the_report_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kept.FOLDER, str(tmp_path / "here"))
    text = report_of(BUGS["release missing"])
    path = Path(text.rpartition("PTX: ")[2])
    assert path.parent == tmp_path / "here"
    lines = path.read_text().splitlines()
    found = re.findall(r"PTX line (\d+): (.*)", text)
    assert found
    assert all(lines[int(number) - 1].strip() == said for number, said in found if said[-1] == ";")


def test_only_the_newest_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kept.FOLDER, str(tmp_path))
    for number in range(40):
        kept.keep(f"// {number}", "entry")
    assert len(list(tmp_path.iterdir())) < 40


def test_a_file_may_vanish_while_the_oldest_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes keep files in the same folder, and remove the oldest."""
    monkeypatch.setenv(kept.FOLDER, str(tmp_path))
    (tmp_path / "gone.ptx").symlink_to(tmp_path / "removed")
    assert kept.keep("// it", "entry") == next(tmp_path.glob("entry-*.ptx"))


def test_a_folder_that_cannot_be_written_costs_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kept.FOLDER, "/dev/null/nowhere")
    assert "likely cause" in report_of(BUGS["twice the bytes"])


def test_lines_of_python_stand_beside_those_of_ptx() -> None:
    body = roles(f".loc 1 7 3\n{wait('full', 0, 'W')}", "").replace("ret;", "")
    text = kernel(body, ".param .u64 d", SHARED) + '.file 1 "/no/kernel.py"\n'
    with pytest.raises(Deadlock) as caught:
        launch(text, np.zeros(64, np.uint32), block=(64,))
    assert "at /no/kernel.py:7" in str(caught.value)


def test_the_error_can_be_pickled_and_carries_its_data() -> None:
    data = np.zeros(64, np.uint32)
    bug = BUGS["twice the bytes"]
    with pytest.raises(Deadlock) as caught:
        launch(kernel(bug.body, ".param .u64 d", SHARED), data, block=(64,))
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert {w.who.index for w in again.stall.waiting} == {0, 1}


def test_a_script_ends_with_the_report_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    text = kernel(roles(wait("full", 0, "W"), ""), ".param .u64 d", SHARED)
    how = "grid=(1,), block=(64,), params=[bytes(8)]"
    script.write_text(f"import ptxemu\nptxemu.load({text!r}).launch({how})\n")
    with report_alone(str(script)) as ended:
        runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().err
    assert ended.code == 1
    assert said.count("likely cause") == 1
    assert f"launched at {script}:2" in said
    assert "Traceback" not in said


def test_other_errors_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError), report_alone("script.py"):
        raise ZeroDivisionError


def test_the_address_of_a_ring_is_followed_through_registers() -> None:
    """Stages of two rings are distinguished although the stage is unknown before run time."""
    bug = BUGS["release missing"]
    aside = f"add.u32 %r10, %r5, 0;\n{ARRIVE.format('%r10')}"
    body = bug.body.replace("PRODUCER:\n", f"PRODUCER:\nbra OVER;\n{aside}OVER:\n")
    text = report_of(Bug(body, ()))
    assert "no instruction of the program arrives on mbarrier empty (0x810)" in text


def test_of_ctas_that_wait_alike_the_odd_one_is_told() -> None:
    text = kernel(
        """mov.u32 %r1, %ctaid.x; mov.u32 %r0, %tid.x; setp.ne.u32 %p0, %r0, 0; @%p0 bra W;
        mbarrier.init.shared.b64 [bar], 2; setp.eq.u32 %p1, %r1, 1; @%p1 bra ODD;
        mbarrier.arrive.shared.b64 %rd1, [bar]; bra W;
        ODD: mbarrier.arrive.shared.b64 %rd2, [bar];
        W: bar.sync 0;
        L: mbarrier.try_wait.parity.shared.b64 %p2, [bar], 0; @!%p2 bra L;""",
        before=".shared .align 8 .b8 bar[8];\n",
    )
    with pytest.raises(Deadlock) as caught:
        launch(text, grid=(3,), resident=3)
    told = str(caught.value)
    assert "warp 0 of all 3 CTAs waits for phase 0 of mbarrier bar" in told
    assert "in cta(1,0,0), unlike in 2 others:" in told
    assert "%rd2, [bar]" in told.partition("made 1 arrival in this phase")[2].split("\n")[1]
