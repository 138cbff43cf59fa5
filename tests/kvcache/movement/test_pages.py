"""`append_pages` and `gather_pages`: they write the reference's bytes and no others, in every
layout of an engine; and their refusals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from kvcache import append_pages, gather_pages
from kvcache.movement import reference
from tests.kvcache.movement.rows_cases import assert_equal, checked

E4M3 = torch.float8_e4m3fn
ORDERS = {"heads-outside": (0, 2, 1, 3), "rows-outside": (0, 1, 2, 3), "heads-first": (2, 0, 1, 3)}


@dataclass(frozen=True)
class Paging:
    """K and V as columns of one tensor [pages, rows, heads, D + Dv] in some order of memory.

    cut: whether tokens are columns of a wider tensor, too.
    """

    rows: int = 4
    heads: int = 2
    columns: tuple[int, int] = (64, 64)
    order: str = "heads-outside"
    dtype: torch.dtype = torch.bfloat16
    pages_dtype: torch.dtype | None = None
    scales: tuple[float, float] | None = None
    cut: bool = True

    def __str__(self) -> str:
        words = (self.rows, self.heads, *self.columns, self.order, self.dtype, self.pages_dtype)
        return "-".join(str(word).removeprefix("torch.") for word in words)

    def pages(self) -> torch.Tensor:
        """Pages of random bytes."""
        generator = torch.Generator().manual_seed(1)
        sizes, order = (5, self.rows, self.heads, sum(self.columns)), ORDERS[self.order]
        dtype = self.pages_dtype or self.dtype
        memory = torch.randint(
            0, 256, (*(sizes[d] for d in order), dtype.itemsize), dtype=torch.uint8,
            generator=generator,
        ).view(dtype)[..., 0]  # fmt: skip
        return memory.permute([order.index(d) for d in range(4)])

    def tokens(self, count: int) -> list[torch.Tensor]:
        """K and V, including values that saturate."""
        generator = torch.Generator().manual_seed(2)
        sizes = [self.columns[0] * self.heads, self.columns[1] * self.heads]
        wide = torch.randn(count, sum(sizes) + 16, generator=generator)
        wide[0, ::7] *= 1e4
        parts = wide.to(self.dtype)[:, 16 if self.cut else 0 :].split(
            [*sizes, 0 if self.cut else 16], 1
        )
        return [x.unflatten(1, (self.heads, -1)) for x in parts[:2]]


CASES = [
    Paging(),
    Paging(1, 4, (128, 128), "rows-outside"),
    Paging(4, 1, (192, 128), "heads-first"),
    Paging(3, 2, (5, 3), cut=False),
    Paging(pages_dtype=E4M3),
    Paging(pages_dtype=E4M3, scales=(0.3, 0.01), order="rows-outside"),
    Paging(dtype=torch.float16, pages_dtype=E4M3, scales=(1.7, 1.0), columns=(8, 4)),
    Paging(dtype=torch.uint8, columns=(32, 16)),
]
FIRST = 7  # tokens; one more has no slot, and one has no row of `slots`


def slots_of(case: Paging) -> torch.Tensor:
    picked = torch.randperm(5 * case.rows, generator=torch.Generator().manual_seed(3))[:FIRST]
    return torch.cat((picked[:3], torch.tensor([-1]), picked[3:]))


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a", "sm_89"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_append(case, arch):
    whole, slots = case.pages(), slots_of(case)
    expected = whole.clone()
    k, v = case.tokens(len(slots) + 1)
    scales = dict(zip(("k_scale", "v_scale"), map(torch.tensor, case.scales or ()), strict=False))
    with checked():
        append_pages(*whole.split(case.columns, -1), k, v, slots, arch=arch, **scales)
    for name, pages, x in zip("kv", expected.split(case.columns, -1), (k, v), strict=True):
        reference.append_pages(pages, x, slots, scales.get(f"{name}_scale"))
    assert_equal(whole, expected)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a", "sm_89"])
@pytest.mark.parametrize("case", [*CASES[:5], CASES[-1]], ids=str)
def test_gather(case, arch):
    pages, slots = case.pages().split(case.columns, -1), slots_of(case)
    dtype = case.pages_dtype or case.dtype
    found = [x.to(dtype) for x in case.tokens(len(slots) + 1)]
    expected = [x.clone() for x in found]
    with checked():
        gather_pages(*pages, slots, *found, arch=arch)
    for mine, theirs, of in zip(found, expected, pages, strict=True):
        reference.gather_pages(of, slots, theirs)
        assert_equal(mine, theirs)


def given(**changes):
    case = Paging()
    k_pages, v_pages = case.pages().split(case.columns, -1)
    k, v = case.tokens(FIRST)
    return {"k_pages": k_pages, "v_pages": v_pages, "k": k, "v": v,
            "slots": torch.arange(FIRST)} | changes  # fmt: skip


FP8 = {name: torch.zeros(5, 4, 2, 64).to(E4M3) for name in ("k_pages", "v_pages")}
ONE = torch.ones(1)


@pytest.mark.usefixtures("no_launches")
@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"slots": torch.arange(FIRST).int()}, ValueError, "slots is torch.int32"),
        ({"slots": torch.tensor([0, 20])}, ValueError, "5 pages of 4 rows have 0 to 19"),
        ({"slots": torch.tensor([3, -1, 3])}, ValueError, "slots has 3 twice"),
        ({"slots": torch.arange(FIRST + 1)}, ValueError, "8 slots: heads and columns"),
        ({"k": torch.zeros(FIRST, 3, 64).bfloat16()}, ValueError, "heads and columns as in pages"),
        ({"k": torch.zeros(FIRST, 2, 64)}, ValueError, "K and V need one dtype"),
        ({"k_pages": torch.zeros(5, 4, 2, 64).to(E4M3)}, ValueError, "K and V need one dtype"),
        ({"k_pages": torch.zeros(6, 4, 2, 64).bfloat16()}, ValueError, "differ in pages"),
        ({"k_pages": torch.zeros(5, 4, 64, 2).bfloat16().mT}, ValueError, "last stride"),
        ({"k_pages": torch.zeros(4, 2, 64).bfloat16().expand(5, -1, -1, -1)}, ValueError, "share"),
        ({"k_scale": ONE, "v_scale": ONE}, ValueError, "k_scale with pages of torch.bfloat16"),
        (FP8 | {"k_scale": ONE}, ValueError, "k_scale alone"),
        (FP8 | {"k_scale": ONE, "v_scale": torch.ones(2)}, ValueError, "one torch.float32"),
        (FP8 | {"k_scale": ONE, "v_scale": 0 * ONE}, ValueError, "v_scale 0.0: elements are div"),
        (FP8 | {"k_scale": ONE, "v_scale": 1e-39 * ONE}, ValueError, "v_scale .*e-39: elements"),
        (FP8 | {"k_scale": ONE * math.nan, "v_scale": ONE}, ValueError, "k_scale nan: elements"),
        (FP8 | {"k_scale": ONE * math.inf, "v_scale": ONE}, ValueError, "k_scale inf: elements"),
        (FP8 | {"arch": "sm_86"}, NotImplementedError, "e4m3 on sm_86: needs sm_89"),
        ({"arch": "sm_70"}, NotImplementedError, "arch 'sm_70'"),
        ({"k": None}, TypeError, "k is None"),
    ],
)  # fmt: skip
def test_what_is_refused(changes, error, match):
    with pytest.raises(error, match=match):
        append_pages(**given(**changes))


@pytest.mark.usefixtures("no_launches")
def test_gathering_what_is_refused():
    case = given()
    wrong = case | {"k": torch.zeros(FIRST, 2, 64), "v": torch.zeros(FIRST, 2, 64)}
    with pytest.raises(ValueError, match="its pages are"):
        gather_pages(**wrong)
    with pytest.raises(ValueError, match="shares memory with v"):
        gather_pages(**case | {"v": case["k"]})
    gather_pages(**case | {"slots": torch.zeros(0, dtype=torch.int64)})
