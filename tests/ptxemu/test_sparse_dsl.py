"""A sparse GEMM of the CuTe DSL (`sparse_gemm.py`): its metadata follow the formulas of the DSL's
`make_tensor_e_atom_layout`, and the MMAs read them where the DSL's descriptors point.
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import numpy as np
import pytest
import torch

import ptxemu
from lab.silicon.conformance.ptx_program import POLICIES
from tests.ptxemu import sparse_gemm
from tests.ptxemu.sparse_gemm import M, N, SparseGemm

CODES = (0x4, 0x8, 0xC, 0x9, 0xD, 0xE)
DTYPES = {
    cutlass.Float16: torch.float16,
    cutlass.Float8E4M3FN: torch.float8_e4m3fn,
    cutlass.Float8E5M2: torch.float8_e5m2,
}
Problem = tuple[list[torch.Tensor], torch.Tensor]


def atom(width: int, row: int, k: int) -> int:
    """Bit of a row's metadata for element k, in an atom of 128 rows by 128 elements."""
    if width == 8:  # (128, 128): (128, 1)
        return 128 * row + k
    # ((8, 2, 8), (16, 2, 4)): ((128, 16, 2048), (1, 1024, 32))
    rows = 128 * (row % 8) + 16 * (row // 8 % 2) + 2048 * (row // 16)
    return rows + k % 16 + 1024 * (k // 16 % 2) + 32 * (k // 32)


def problem(gemm: SparseGemm) -> Problem:
    """Random small integers: A as stored, B, E, D; and A with its zeros."""
    rng, width = np.random.default_rng(0), gemm.type.width
    codes = rng.choice(np.array(CODES), (M, gemm.k // 4))
    kept, b = (rng.integers(-3, 4, shape) for shape in ((M, gemm.kept), (N, gemm.k)))
    whole, bits = np.zeros((M, gemm.k)), np.zeros((gemm.k // 128, 128 * 128), np.uint8)
    for row in range(M):
        for group, code in enumerate(codes[row].tolist()):
            for which, place in enumerate((code & 3, code >> 2)):
                whole[row, 4 * group + place] = kept[row, 2 * group + which]
            for bit in range(4):
                block, k = divmod(4 * group + bit, 128)
                bits[block, atom(width, row, k)] = code >> bit & 1
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32).reshape(-1, M, 4)
    e = np.ascontiguousarray(words.transpose(1, 0, 2)).reshape(M, -1)
    stored = [torch.from_numpy(x).to(DTYPES[gemm.type]) for x in (kept, b)]
    if width == 8:
        stored = [x.view(torch.uint8) for x in stored]
    expected = torch.from_numpy(whole @ b.T).float()
    return [*stored, torch.from_numpy(e), torch.empty(M, N)], expected


def launch(gemm: SparseGemm, policies: tuple[str, ...]) -> list[ptxemu.LaunchReport]:
    tensors, expected = problem(gemm)
    compiled, views = sparse_gemm.compiled(gemm, tensors)
    reports = []
    for policy in policies:
        tensors[-1].fill_(torch.nan)
        options = ptxemu.Options(policy=policy, check=True)
        reports += ptxemu.run(compiled, *views, options=options).launches
        assert torch.equal(tensors[-1], expected) or reports[-1].findings
    return reports


@pytest.mark.parametrize("type_", DTYPES, ids=lambda type_: type_.__name__)
def test_products(type_: type) -> None:
    for report in launch(SparseGemm(type_), POLICIES):
        assert not report.findings
        assert any(opcode.startswith("tcgen05.mma.sp") for opcode in report.by_warp[0])


def test_without_the_barrier_behind_the_metadata(changed: Callable[..., None]) -> None:
    """Each warp stores the metadata of its lanes, and one of them multiplies."""
    statement = "self.put_metadata(base + N, e)\n        cute.arch.sync_threads()"
    changed(sparse_gemm, [sparse_gemm], "SparseGemm", (statement, "self.put_metadata(base + N, e)"))
    (report,) = launch(sparse_gemm.SparseGemm(cutlass.Float16), ("round-robin",))
    assert {finding.check for finding in report.findings} <= {"race", "uninitialised"}
    assert "tcgen05.mma is not ordered after tcgen05.st" in {f.message for f in report.findings}
