"""Attention on mma.sync, for all other GPUs: the problems of the other kernels, and its own."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from fmha.config import PORTABLE_SCHEDULES, AttentionConfig
from fmha.plan import kernel_of, make_plan
from fmha.portable import fetch, kernel, math, products, teams
from kernelkit.plan import hw
from lab.problems.attention import PATIENCE, Case
from ptxemu import Options
from tests.fmha import test_kernel, test_sm90
from tests.fmha.space import EDGES, FACTORS, PLAIN, case_of, quick_rows
from tests.fmha.space import RULES as SHARED_RULES
from tests.fmha.test_kernel import by_group
from tests.support.pairwise import Rule, Space, covering

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

CHECKED = Options(policy="adversarial", seed=2, check=True, limit=PATIENCE)
FRIENDLY = Options(policy="round-robin", limit=PATIENCE)
ARCHS = ("sm_89", "sm_120a")
LARGE = "sm_90a"
DIMS = (
    (16, 16), (48, 48), (64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256),
    (512, 512), (192, 128), (32, 144), (144, 32),
)  # fmt: skip
SPACE = Space(
    FACTORS | {"dims": DIMS, "tile_n": (0, 16, 48), "schedule": ("", "keys")},
    (
        *SHARED_RULES,
        Rule(("schedule", "tile_n"), lambda schedule, keys: not schedule or keys == 0),
        Rule(("dims", "tile_n"), lambda dims, keys: keys != 48 or max(dims) < 192),
        Rule(("dims", "rope_dim"), lambda dims, turned: turned <= dims[1]),
    ),
)
ROWS = covering(SPACE)
QUICK_ROWS = quick_rows(ROWS)
MATRIX_ROWS = [row for row in ROWS if row not in QUICK_ROWS]


def check(case: Case, *schedules: Options, arch: str = ARCHS[0]) -> None:
    test_kernel.check(by_mma_sync(case), schedules, arch)


def by_mma_sync(case: Case) -> Case:
    schedule = case.schedule if case.schedule in PORTABLE_SCHEDULES else ""
    return dataclasses.replace(case, instructions="mma.sync", schedule=schedule)


def with_archs(rows: list) -> list:
    """The problems of rows, each on the next architecture in turn; a problem that does not fit the
    shared memory of small GPUs runs on a large one."""
    turns = itertools.cycle(ARCHS)
    found = []
    for case, turn in zip(map(case_of, rows), turns, strict=False):
        arch = LARGE if case.schedule == "keys" else turn
        found.append(pytest.param(case, arch, id=f"{case}-{arch}"))
    return found


@pytest.mark.parametrize("case", by_group(PLAIN))
def test_shapes(case):
    check(case, CHECKED, FRIENDLY)


@pytest.mark.parametrize(("case", "arch"), with_archs(QUICK_ROWS))
def test_every_value_of_every_factor(case, arch):
    check(case, CHECKED, arch=arch)


@pytest.mark.parametrize(("case", "arch"), with_archs(MATRIX_ROWS))
def test_every_pair_of_values(case, arch):
    check(case, CHECKED, arch=arch)


@pytest.mark.parametrize("case", by_group(EDGES[: len(EDGES) // 2]))
def test_edges_of_masks(case):
    check(case, CHECKED, FRIENDLY)


@pytest.mark.parametrize("arch", [*ARCHS, LARGE])
@pytest.mark.parametrize("size", [1, 2, 4, 17])
def test_pages_of_few_rows(size, arch):
    """Rows of keys are fetched one by one; TMA, whose boxes need contiguous rows, refuses such
    pages."""
    case = Case(
        40, 150, (4, 2), batch=2, kv_lens=(150, 61), page_size=size, causal=True, window=(37, None)
    )
    check(case, CHECKED, FRIENDLY, arch=arch)


GROWING = Case(130, 640, (1, 1), dims=(128, 128), amplitude=12.0)  # maxima move between tiles
SPLIT = dataclasses.replace(GROWING, dims=(256, 256), slices=2, tile_m=64, tile_n=16)
LATE = Case(200, 300, (2, 1), dims=(48, 48), window=(20, 0), q_offset=100, amplitude=4.0)


def test_a_window_hides_whole_tiles_of_late_rows():
    """The last rows of a block see no key of the first tile: (-inf) - (-inf) must not become
    NaN."""
    check(LATE, CHECKED)


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_warps_share_a_head_dim(slices):
    check(dataclasses.replace(SPLIT, slices=slices, schedule="base"), CHECKED, FRIENDLY)


PAIRS = dataclasses.replace(GROWING, dims=(256, 256), schedule="keys")
FEW = dataclasses.replace(PAIRS, dims=(64, 144), tile_m=32, tile_n=32, kv_lens=(1,))


# One step of Q K^T, so nothing can be fetched for half of it; and pages.
NARROW = Case(40, 300, (1, 1), dims=(16, 160), causal=True, page_size=32, kv_lens=(270,))


@pytest.mark.parametrize("case", [PAIRS, FEW, NARROW], ids=str)
def test_warps_share_keys(case):
    check(case, CHECKED, FRIENDLY, arch=LARGE)


def test_rows_find_their_first_maximum_however_low():
    check(dataclasses.replace(test_sm90.LOW, tile_n=0), FRIENDLY)


@pytest.mark.parametrize("dim", [48, 16, 80])
def test_two_warps_fetch_an_odd_number_of_pieces_of_q(dim):
    """16 rows have three of 32 chunks at head dim 48."""
    check(Case(40, 70, dims=(dim, dim), tile_m=16, schedule="keys"), CHECKED, arch=LARGE)


@pytest.mark.parametrize(("dim", "slices"), [(16, 2), (144, 4)])
def test_a_slice_without_columns_turns_none(dim, slices):
    """The last slice would read past the end of the tables of angles."""
    check(Case(20, 40, dims=(dim, dim), slices=slices, rope_dim=16), CHECKED)


TRAPS = {
    # The weights show if their reference maximum is too small; a kernel that does not check
    # overflows.
    "asks": (
        (math, "RowMath"),
        dataclasses.replace(GROWING, amplitude=60.0, dtype="fp16"),
        ("found or not (sums[number][half] <= limit[half])", "found"),
    ),
    "waits for keys": (
        (math, "RowMath"), GROWING,
        ("cute.arch.cp_async_wait_group(0)\n            cute.arch.sync_threads()",
         "cute.arch.sync_threads()"),
    ),
    "meets": (
        (math, "RowMath"), GROWING,
        ("cute.arch.cp_async_wait_group(0)\n            cute.arch.sync_threads()",
         "cute.arch.cp_async_wait_group(0)"),
    ),
    "meets for P": (
        (teams, "SliceMath"), SPLIT,
        ("meet_team(plan, place)\n        take_weights", "take_weights"),
    ),
    "meets for sums": (
        (teams, "add_up"), SPLIT,
        ("meet_team(plan, place)\n    _add(plan, own, place, buffers, 1 - place.slice)",
         "_add(plan, own, place, buffers, 1 - place.slice)"),
    ),
    "clears": (
        (fetch, "fetch_part"), Case(100, 200, (1, 1), kv_lens=(150,)),
        ("coming.left <= 0", "coming.left <= -512"),
    ),
    "waits for the other half of P": (
        (teams, "KeyMath"), PAIRS,
        ('meet(plan.barriers, "ready", 2 * place.team, other)', "pass"),
    ),
    "meets, late, for maxima": (
        (teams, "KeyMath"), PAIRS,
        ("meet_team(plan, place)\n            self.weigh", "pass\n            self.weigh"),
    ),
    "meets before keys are replaced": (
        (teams, "KeyMath"), PAIRS,
        ("cute.arch.cp_async_wait_group(0)\n            cute.arch.sync_threads()",
         "cute.arch.cp_async_wait_group(0)"),
    ),
    "waits for keys that were fetched between products": (
        (teams, "KeyMath"), PAIRS,
        ("cute.arch.cp_async_wait_group(0)\n            cute.arch.sync_threads()",
         "cute.arch.sync_threads()"),
    ),
    "meets for sums of weights": (
        (teams, "KeyMath"), PAIRS,
        ("Int32(0))\n        meet_team(plan, place)\n", "Int32(0))\n"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS)
def test_a_kernel_without_its_cure_is_noticed(changed, trap):
    (module, name), case, replacement = TRAPS[trap]
    users = [kernel] if name.endswith("Math") else [teams, math, products, fetch]
    changed(module, [user for user in users if hasattr(user, name)], name, replacement)
    assert noticed(case)


def noticed(case: Case) -> bool:
    """Whether the result is wrong or the checker reports something."""
    portable = by_mma_sync(case)
    return test_sm90.noticed(portable, LARGE if portable.schedule == "keys" else ARCHS[0])


@pytest.mark.parametrize(
    ("arch", "fields", "folder"),
    [
        ("sm_89", {}, "portable"),
        ("sm_120a", {"head_dim": 512}, "portable"),
        ("sm_90a", {"head_dim": 128}, "sm90"),
        ("sm_90a", {"head_dim": 80}, "portable"),
        ("sm_103a", {}, "sm100"),
        ("sm_100a", {"instructions": "mma.sync"}, "portable"),
    ],
)
def test_which_kernel_serves(arch, fields, folder):
    assert kernel_of(AttentionConfig(**fields), arch) == f"fmha.{folder}.kernel"


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_121a"])
def test_every_head_dim_fits(arch):
    for head_dim, v_dim in itertools.product(range(16, 513, 16), (0, 16, 128, 512)):
        config = AttentionConfig(head_dim, v_dim, instructions="mma.sync")
        plan = make_plan(config, arch)
        assert plan.smem.bytes <= hw.smem_bytes_per_cta(arch)
        assert plan.layout.dims * plan.layout.shape.slices >= head_dim


@pytest.mark.parametrize(
    ("arch", "schedules"),
    [("sm_89", ("base", "keys")), ("sm_90a", ("base", "pingpong")), ("sm_100a", ("base", "pingp"))],
)
def test_options_are_those_of_the_kernel_that_serves(arch, schedules):
    """Without a named instruction, an arch whose kernel uses mma.sync has that kernel's schedules
    and slices."""
    portable = arch == "sm_89"
    if portable:
        assert make_plan(AttentionConfig(head_dim=128, schedule="keys"), arch).layout.warps
        assert make_plan(AttentionConfig(slices=2), arch).layout.shape.slices == 2
    wrong = {"schedule": "pingpong"} if portable else {"schedule": "keys"}
    words = ".*".join(map(str, (*wrong.values(), arch, *schedules)))
    with pytest.raises(NotImplementedError, match=words):
        make_plan(AttentionConfig(**wrong), arch)
    if not portable:
        with pytest.raises(NotImplementedError, match=f"slices 2 on {arch}"):
            make_plan(AttentionConfig(slices=2), arch)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"dtype": "e4m3"}, NotImplementedError, "e4m3"),
        ({"k_is_v": True}, NotImplementedError, "k_is_v"),
        ({"ctas": 2}, NotImplementedError, "ctas 2"),
        ({"schedule": "pingpong"}, NotImplementedError, "pingpong"),
        ({"tile_n": 24}, ValueError, "tile_n 24"),
        ({"tile_m": 40}, ValueError, "tile_m 40"),
        ({"slices": 3}, ValueError, "slices 3"),
        ({"schedule": "keys", "instructions": "mma.sync", "slices": 4}, ValueError, "slices 4"),
        ({"schedule": "keys", "instructions": "mma.sync", "tile_n": 48}, ValueError, "tile_n 48"),
        ({"schedule": "keys", "instructions": "mma.sync", "tile_m": 192}, ValueError, "5 pairs"),
        ({"pdl": True}, NotImplementedError, "pdl=True on sm_89.*compute capability 9.0"),
        ({"k_stages": 1}, ValueError, "k_stages 1"),
        (
            {"head_dim": 272, "tile_m": 16, "slices": 1, "instructions": "mma.sync"},
            ValueError,
            "32 threads.*34 pieces",
        ),
        ({"v_stages": 2}, NotImplementedError, "v_stages 2"),
        ({"head_dim": 520}, NotImplementedError, "520"),
        ({"head_dim": 512, "tile_n": 128}, ValueError, "101376"),
    ],
)
def test_what_it_does_not_do_is_refused(fields, error, words):
    with pytest.raises(error, match=words):
        make_plan(AttentionConfig(**fields), "sm_89")
