"""Tolerance of a kernel's error: a rule that calibrates itself, and its report.

error <= 2 E + 1 ulp of the io dtype at the row's max |O|, where E is the largest error that the
reference with the kernel's rounding points makes on the same inputs. LSE: 2^-10 + 2 E + 2 ulp of
fp32 at |LSE|, which is computed in log2 units: log2(e) times the scale, the product with the row
maximum and the one with ln 2 are rounded, and so is the result.
Sums belong to these points: of a GPU's results the reference sums as its tensor cores do, bit for
bit (`kernelkit.numerics.aligned_sums`), since what they cut off adds up where fp32's roundings
cancel. Infinities and NaNs have to agree, place by place, before any difference is taken. A
constant here changes only with a note that names the rounding that was forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernelkit.numerics.definition import saturated

LSE_FLOOR = 2.0**-10  # lg2.approx, ex2.approx and the fp32 sum of a row
LSE_ULPS = 2.0  # four roundings of half an ulp each, which show where |LSE| is large
REFERENCE_FACTOR = 2.0


@dataclass(frozen=True)
class Report:
    """Verdict, the worst coordinate and its numbers; `str` is one line for an assertion."""

    name: str
    ok: bool
    coordinate: tuple[int, ...]
    error: float
    limit: float
    reference_error: float
    reason: str = ""

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "OUT OF TOLERANCE"
        return (
            f"{self.name}: {verdict}, error {self.error:.3e} <= {self.limit:.3e} at "
            f"{self.coordinate}, reference {self.reference_error:.3e} {self.reason}".rstrip()
        )


def ulp(magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Spacing of `dtype` numbers at `magnitude` (fp64, >= 0); the smallest normal's below it."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(magnitude.clamp_min(info.tiny))
    return torch.ldexp(torch.full_like(magnitude, info.eps), exponent - 1)


def _allowed(
    exact: torch.Tensor, rounded: torch.Tensor, dtype: torch.dtype, dims: tuple[int, ...] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how far each element of O may be off, and the error of the reference."""
    reference_error = _largest(_difference(rounded, exact), dims)
    row_top = _finite(exact).abs().amax(dim=-1, keepdim=True)
    limit = REFERENCE_FACTOR * reference_error + ulp(row_top, dtype).expand_as(exact)
    return limit, reference_error


def compare_output(
    actual: torch.Tensor,
    exact: torch.Tensor,
    rounded: torch.Tensor,
    dtype: torch.dtype,
    dims: tuple[int, ...] | None = None,
) -> Report:
    """O of a kernel against the fp64 definition; the last dimension is a row.

    dims: over which the largest error of the reference is taken, all by default; what else there is
    is judged by itself.
    """
    mismatch = _special_mismatch("O", actual, exact)
    if mismatch is not None:
        return mismatch
    limit, reference_error = _allowed(exact, rounded, dtype, dims)
    return _worst("O", _difference(actual, exact), limit, reference_error)


def compare_e4m3(
    actual: torch.Tensor,
    exact: torch.Tensor,
    rounded: torch.Tensor,
    dtype: torch.dtype,
    dims: tuple[int, ...] | None = None,
) -> Report:
    """O of a kernel in e4m3: each element is a number within `compare_output`, rounded once.

    Args:
        actual: e4m3.
        exact: the fp64 definition of O / out_scale, not saturated.
        rounded: the same with the kernel's roundings but the last, in fp32.
        dtype, dims: as of `compare_output`.
    """
    e4m3 = torch.float8_e4m3fn
    mismatch = _special_mismatch("O", actual.float(), saturated(exact, e4m3).float())
    if mismatch is not None:
        return mismatch
    limit, reference_error = _allowed(exact, rounded, dtype, dims)
    low, high = (saturated(exact + side, e4m3).double() for side in (-limit, limit))
    found = _finite(actual)
    nearest = torch.minimum(torch.maximum(found, _finite(low)), _finite(high))
    # Codes are discrete: a wrong one is off by the smallest subnormal or more.
    allowed = torch.full_like(found, torch.finfo(e4m3).smallest_normal / 16)
    return _worst("O in e4m3", (found - nearest).abs(), allowed, reference_error)


def compare_lse(
    actual: torch.Tensor,
    exact: torch.Tensor,
    rounded: torch.Tensor,
    name: str = "LSE",
    dims: tuple[int, ...] | None = None,
) -> Report:
    """LSE (or row_max) of a kernel against the fp64 definition, natural-log units. dims: as of
    `compare_output`."""
    mismatch = _special_mismatch(name, actual, exact)
    if mismatch is not None:
        return mismatch
    reference_error = _largest(_difference(rounded, exact), dims)
    limit = LSE_FLOOR + REFERENCE_FACTOR * reference_error
    limit = limit + LSE_ULPS * ulp(_finite(exact).abs(), torch.float32)
    return _worst(name, _difference(actual, exact), limit, reference_error)


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(tensor.double(), nan=0.0, posinf=0.0, neginf=0.0)


def _difference(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (_finite(first) - _finite(second)).abs()


def _largest(error: torch.Tensor, dims: tuple[int, ...] | None) -> torch.Tensor:
    """Over these dimensions, which are kept with size 1."""
    if not error.numel():
        return error.new_zeros(())
    dims = tuple(range(error.ndim)) if dims is None else dims
    return error.amax(dim=dims, keepdim=True) if dims else error


def _special_mismatch(name: str, actual: torch.Tensor, exact: torch.Tensor) -> Report | None:
    for kind, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = (test(actual) != test(exact)).nonzero()
        if len(wrong):
            where = tuple(wrong[0].tolist())
            reason = f"({kind} in one only: kernel {actual[where]}, exact {exact[where]})"
            return Report(name, False, where, float("inf"), 0.0, 0.0, reason)
    return None


def _worst(
    name: str, error: torch.Tensor, limit: torch.Tensor, reference_error: torch.Tensor
) -> Report:
    if not error.numel():
        return Report(name, True, (), 0.0, 0.0, 0.0)
    index = int((error / limit).argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), error.shape))
    worst, allowed = error[where].item(), limit[where].item()
    of_reference = reference_error.expand_as(error)[where].item()
    return Report(name, worst <= allowed, where, worst, allowed, of_reference)
