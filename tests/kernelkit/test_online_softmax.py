"""kernelkit.device.online_softmax, function by function, in the emulator."""

import itertools
import math

import torch

from kernelkit.device import online_softmax
from tests.kernelkit.row_kernel import COLUMNS, apply_to_rows

INF = math.inf
SLACK_LOG2 = 8.0
EDGES = (-(2**30), -1, 0, 1, 31, 32, 33, 63, 64, 65, 2**30)
NO_INTEGERS = torch.zeros(1, 1, dtype=torch.int32)


def run(apply, scores: torch.Tensor, numbers: torch.Tensor, integers: torch.Tensor = NO_INTEGERS):
    rows = len(scores)
    return apply_to_rows(apply, scores, integers.expand(rows, -1), numbers.expand(rows, -1))


def rows_of(*values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


# Functions that `apply_to_rows` calls in the kernel.


def keep_below(scores, integers, _numbers):
    online_softmax.keep_columns(scores, integers[0])
    return ()


def keep_window(scores, integers, _numbers):
    online_softmax.keep_columns(scores, integers[0], integers[1], integers[2])
    return ()


def softcap(scores, _integers, numbers):
    online_softmax.softcap_scores(scores, numbers[0])
    return ()


def next_max(scores, _integers, numbers):
    top = online_softmax.top_score(scores, numbers[0])
    return online_softmax.next_max(top, numbers[0], numbers[1], SLACK_LOG2)


def refer(scores, _integers, numbers):
    """numbers: row_max, scale_log2, the previous shift."""
    top = online_softmax.top_score(scores, numbers[0])
    one_hot = online_softmax.ONE_HOT_LOG2 / numbers[1]
    found = online_softmax.refer(top, numbers[0], numbers[2], numbers[1], one_hot, SLACK_LOG2)
    online_softmax.exponentiate(scores, found[2], found[3])
    return found


def exponentiate(scores, numbers, share=0):
    shift = online_softmax.shift_of(numbers[0], numbers[1])
    online_softmax.exponentiate(scores, numbers[1], shift, share)


def weigh(scores, _integers, numbers):
    exponentiate(scores, numbers)
    return (online_softmax.row_total(scores, numbers[2]),)


def weigh_by_polynomial(scores, _integers, numbers):
    exponentiate(scores, numbers, 16)
    return ()


def weigh_by_both(scores, _integers, numbers):
    exponentiate(scores, numbers, 4)
    return ()


def finish(_scores, _integers, numbers):
    return online_softmax.finish_row(numbers[0], numbers[1])


def finish_with_sink(_scores, _integers, numbers):
    return online_softmax.finish_row(numbers[0], numbers[1], numbers[2])


def kept_by(apply, bounds: torch.Tensor) -> torch.Tensor:
    """Return a mask of surviving scores, bool [rows, COLUMNS]; surviving scores are unchanged."""
    scores = torch.arange(COLUMNS).float().expand(len(bounds), -1)
    after, _ = run(apply, scores, torch.zeros(1, 1), bounds)
    assert torch.equal(after[after != -INF], scores[after != -INF])
    return after != -INF


def test_columns_at_and_beyond_the_end_are_masked():
    ends = torch.tensor(EDGES, dtype=torch.int32)[:, None]
    assert torch.equal(kept_by(keep_below, ends), torch.arange(COLUMNS) < ends)


def test_columns_of_window_and_prefix_are_kept():
    bounds = torch.tensor(list(itertools.product(EDGES, EDGES, EDGES)), dtype=torch.int32)
    end, begin, prefix_end = bounds[:, :, None].unbind(1)
    column = torch.arange(COLUMNS)
    wanted = ((column >= begin) & (column < end)) | (column < prefix_end)
    assert torch.equal(kept_by(keep_window, bounds), wanted)


def test_masking_replaces_nan():
    after, _ = run(keep_below, torch.full((1, COLUMNS), math.nan), torch.zeros(1, 1))
    assert (after == -INF).all()


def test_softcap_is_a_hyperbolic_tangent():
    cap = 30.0
    scores = torch.linspace(-20 * cap, 20 * cap, 32 * COLUMNS).view(32, COLUMNS)
    after, _ = run(softcap, scores, torch.full((1, 1), 2 / (cap * math.log(2))))
    wanted = cap * torch.tanh(scores.double() / cap)
    assert (cap + 2 * cap * after.double() - wanted).abs().max() < cap * 2.0**-21
    assert (after.flatten().diff() >= 0).all()


def test_softcap_of_infinities_is_finite():
    scores = torch.full((1, COLUMNS), INF)
    scores[:, ::2] = -INF
    after, _ = run(softcap, scores, torch.full((1, 1), 0.1))
    assert torch.equal(after, torch.where(scores > 0, 0.0, -1.0))


def test_reference_maximum_moves_only_beyond_the_slack():
    scale_log2 = 0.5
    tops = torch.tensor([-100.0, 10.0, 26.0, 26.1, 60.0])
    scores = torch.full((len(tops), COLUMNS), -INF)
    scores[:, COLUMNS - 1] = tops
    _, results = run(next_max, scores, rows_of((10.0, scale_log2)))
    new_max = torch.tensor([10.0, 10.0, 10.0, 26.1, 60.0])
    assert torch.equal(results[:, 0], new_max)
    shrink = torch.exp2((10.0 - new_max) * scale_log2)
    torch.testing.assert_close(results[:, 1], shrink, rtol=2.0**-20, atol=0)


def test_first_keys_of_a_row_shrink_nothing():
    scores = torch.full((2, COLUMNS), -INF)
    scores[1, 3] = -5.0
    _, results = run(next_max, scores, rows_of((-INF, 1.0)))
    assert results[:, :2].tolist() == [[-INF, 1.0], [-5.0, 1.0]]


def test_what_a_row_refers_to_moves_with_its_shift():
    """The maximum is that of `next_max`; acc_scale is the ratio of weights before and after."""
    scale_log2 = 0.3
    older = torch.tensor([-3.0, -3.0, 1e7, 2.0**22])
    tops = torch.tensor([-100.0, 60.0, 1.1e7, 2.0**22 + 30])
    scores = torch.full((4, COLUMNS), -INF)
    scores[:, 0], scores[:, 1] = older, tops
    shift = -older * torch.tensor(scale_log2)
    numbers = torch.stack((older, torch.full((4,), scale_log2), shift), dim=1)
    after, results = run(refer, scores, numbers)
    assert results[:, 0].tolist() == [-3.0, 60.0, *tops[2:].tolist()]
    moved = results[:, 3]
    torch.testing.assert_close(
        results[:, 1].double(), torch.exp2(moved.double() - shift.double()), rtol=2.0**-18, atol=0
    )
    exact = scores[:, :2].double() * torch.tensor(scale_log2).double() + moved[:, None].double()
    torch.testing.assert_close(after[:, :2].double(), exact.exp2(), rtol=2.0**-18, atol=1e-38)


def test_first_keys_of_a_row_shrink_nothing_that_is_summed():
    """The factor is finite for any maximum."""
    scores = torch.full((4, COLUMNS), -INF)
    scores[1:, 3] = torch.tensor([-5.0, -1e5, 1e5])
    _, results = run(refer, scores, rows_of((-INF, 1.0, 0.0)))
    assert results[:, 0].tolist() == [-INF, -5.0, -1e5, 1e5]
    assert results[:, 1].tolist() == [1.0, 1.0, 1.0, 0.0]


def test_of_scores_beyond_all_others_the_largest_count():
    """Scores equal to the maximum get equal weights, from 2^-8 to 2^8; those one fp32 below get at
    most 2^-15 of that."""
    tops = torch.tensor([2.0**28, 1.2e9, -3.3e9, 7e19, 2.9e38, -2.9e38])
    scores = tops[:, None].repeat(1, COLUMNS)
    scores[:, 2:] = torch.nextafter(tops, torch.tensor(-INF))[:, None]
    for scale_log2 in (1.0, 1.44, 1e12):
        after, results = run(refer, scores, rows_of((-INF, scale_log2, 0.0)))
        assert (after[:, 0] == after[:, 1]).all()
        assert ((after[:, 0] >= 2.0**-8) & (after[:, 0] <= 2.0**8)).all()
        assert (after[:, 2:] <= 2.0**-15 * after[:, :1]).all()
        # A tile with the same maximum changes nothing, one with a larger maximum everything.
        again = torch.stack((results[:, 0], torch.full((6,), scale_log2), results[:, 3]), dim=1)
        _, same = run(refer, scores, again)
        assert torch.equal(same[:, 1], torch.ones(6))
        assert torch.equal(same[:, 2:4], results[:, 2:4])
        larger = torch.nextafter(tops, torch.tensor(INF))[:, None].expand(-1, COLUMNS)
        _, moved = run(refer, larger, again)
        assert (moved[:, 1] <= 2.0**-15).all()


def test_weights_and_their_sum():
    scores = torch.randn(32, COLUMNS, generator=torch.Generator().manual_seed(0)) * 4
    scores[:, 5] = -INF
    scores[0] = -INF
    scales, older = torch.full((32,), 1.25), torch.arange(32)
    numbers = torch.stack((scores.amax(dim=1), scales, older), dim=1)
    after, results = run(weigh, scores, numbers)
    maxima = numbers[:, :1].double().masked_fill(numbers[:, :1] == -INF, 0.0)
    wanted = torch.exp2((scores.double() - maxima) * 1.25)
    torch.testing.assert_close(after.double(), wanted, rtol=2.0**-18, atol=0)
    sums = after.double().sum(dim=1) + older
    torch.testing.assert_close(results[:, 0].double(), sums, rtol=2.0**-20, atol=0)


def test_the_error_of_the_polynomial():
    """Every exponent of a weight, in steps of 1/64; integers are exact."""
    exponents = torch.linspace(-126, 15, 141 * 64 + 1)
    exponents = torch.cat((exponents, exponents[:-1] + 0.0071, torch.arange(-126.0, 16)))
    scores = torch.nn.functional.pad(exponents, (0, -len(exponents) % COLUMNS)).view(-1, COLUMNS)
    after, _ = run(weigh_by_polynomial, scores, torch.tensor([[0.0, 1.0]]))
    wanted = torch.exp2(scores.double())
    error = ((after - wanted) / wanted).abs()
    assert 0.9 * online_softmax.EXP2_ERROR < error.max() <= online_softmax.EXP2_ERROR
    whole = scores == scores.round()
    assert torch.equal(after[whole], wanted[whole].float())


def test_the_polynomial_of_what_is_far_below_is_nothing():
    scores = torch.full((1, COLUMNS), -INF)
    scores[0, : COLUMNS // 2] = torch.linspace(-127, -(2.0**100), COLUMNS // 2)
    after, _ = run(weigh_by_polynomial, scores, torch.tensor([[0.0, 1.0]]))
    assert torch.equal(after, torch.zeros(1, COLUMNS))


def test_a_quarter_goes_through_the_polynomial():
    scores = torch.full((1, COLUMNS), -0.3)
    after, _ = run(weigh_by_both, scores, torch.tensor([[0.0, 1.0]]))
    exact = (after / 2**-0.3 - 1).abs() < 2.0**-20
    assert exact.sum() == COLUMNS * 3 // 4


def test_end_of_a_row():
    cases = rows_of((3.0, 2.5), (-400.0, 1.0), (-INF, 0.0))
    _, results = run(finish, torch.zeros(3, COLUMNS), cases)
    lse = (cases[:2, 0].double() + cases[:2, 1].double().log2()) * math.log(2)
    torch.testing.assert_close(results[:2, 0], 1 / cases[:2, 1], rtol=2.0**-20, atol=0)
    torch.testing.assert_close(results[:2, 1].double(), lse, rtol=2.0**-20, atol=0)
    assert results[2, :2].tolist() == [0.0, -INF]


def test_end_of_a_row_with_a_sink():
    finite = [(3.0, 2.5, 1.0), (3.0, 2.5, 100.0), (-400.0, 1.0, 0.5), (500.0, 7.0, -800.0)]
    cases = rows_of(*finite, (-INF, 0.0, -2.0), (4.0, 2.0, -INF), (-INF, 0.0, -INF))
    _, results = run(finish_with_sink, torch.zeros(len(cases), COLUMNS), cases)
    max_log2, row_sum, sink = cases.double().unbind(1)
    lse = torch.logaddexp(max_log2 * math.log(2) + row_sum.log(), sink)
    factor = torch.exp(max_log2 * math.log(2) - lse)
    torch.testing.assert_close(results[:6, 0].double(), factor[:6], rtol=2.0**-16, atol=1e-40)
    torch.testing.assert_close(results[:6, 1].double(), lse[:6], rtol=2.0**-20, atol=0)
    assert results[6, :2].tolist() == [0.0, -INF]
