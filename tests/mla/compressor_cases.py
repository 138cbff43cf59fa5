"""Compressors over a cache with foreign memory, and over poisoned pools: their results are compared
with whole histories in fp64, with the reference, and with other cuts of the same tokens.

The numbers of a token are a function of its position and of the token, so that two requests with
the same prefix may share blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from kvcache.books.manager import CLEAN, RESERVED
from kvcache.books.requests import Request
from kvcache.books.slot_pool import Sizes
from kvcache.books.work import Pool
from kvcache.layouts.latent import ROPE
from kvcache.layouts.models import CSA, HCA, Options, deepseek_v4
from kvcache.layouts.rows import Rows
from kvcache.memory.cache import Cache
from mla.compressor import reference
from mla.compressor.api import Compressor, Tables, compress
from mla.compressor.arguments import Job
from mla.indexer.formats import FORMATS
from tests.kvcache.movement.rows_cases import BESIDE, around, assert_equal, checked, poisoned
from tests.mla.index_cases import sylvester

LONGEST = 700  # tokens of a history
VOCABULARY = 11
SPREAD = 3.0  # of scores
EPS = 1e-6
HALF_ULP = 2.0**-8  # of bf16, at most, relative to the number
NOISE = 2e-6  # error of fp32 sums over a row
KINDS = ("csa", "index", "hca", "online")


@dataclass(frozen=True)
class Setup:
    """Options of a compressor and its kernel.

    kind: 'csa', 'index' or 'hca'.
    record, draft, online: Options of the layout.
    arch: architecture of the kernels.
    """

    kind: str
    record: str = "bf16"
    draft: int = 0
    online: bool = False
    arch: str | None = None
    device: str = "cpu"

    def __str__(self) -> str:
        parts = (self.kind, self.record, f"draft{self.draft}", "online" * self.online, self.arch)
        return "-".join(filter(None, parts))

    @cached_property
    def layout(self):
        options = Options(record=self.record, draft=self.draft, online_hca=self.online)
        return deepseek_v4("v4", [HCA, CSA, 0], 128, options)

    @property
    def tail(self):
        return self.layout.find(f"{self.kind}_tail")


def setup_of(kind: str, **options) -> Setup:
    """Return a Setup for one of KINDS, with options for its other fields."""
    return Setup("hca" if kind == "online" else kind, online=kind == "online", **options)


def normal(*shape: int, seed: int, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device)


class Runner:
    """Requests of one cache, by name; steps run the kernel under the checker."""

    def __init__(self, setup: Setup, blocks: int = 24) -> None:
        self.setup, layout = setup, setup.layout
        self.cache = Cache(
            layout, Sizes(blocks=blocks, states=6, checkpoints=8), device=setup.device
        )
        for pool, kept in ((Pool.BLOCKS, 1), (Pool.STATES, CLEAN + 1)):
            assert kept <= RESERVED
            self.cache.storage.pools[pool][RESERVED:] = 0xFF  # NaN in every format
        tail, device = setup.tail, setup.device
        self.columns = tail.overlap * tail.width
        ape = normal(tail.ratio, self.columns, seed=1, device=device)
        self.compressor = Compressor(
            ape, 1.0 + 0.1 * normal(tail.width, seed=2, device=device), EPS
        )
        self.by_position = normal(LONGEST, 2, self.columns, seed=3, device=device)
        self.by_token = normal(VOCABULARY, 2, self.columns, seed=4, device=device)
        angles = torch.arange(LONGEST)[:, None] * 10000.0 ** (-torch.arange(0, ROPE, 2) / ROPE)
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)
        self.requests: dict[str, Request] = {}
        self.histories: dict[str, list[int]] = {}
        self.hits: dict[str, int] = {}
        self.backwards = False  # whether ends are listed backwards

    def numbers(self, tokens: Sequence[int], begin: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (values, scores) of tokens from position `begin` on."""
        picked = torch.tensor(tokens, dtype=torch.long, device=self.setup.device) % VOCABULARY
        both = self.by_position[begin : begin + len(tokens)] + self.by_token[picked]
        return both[:, 0], both[:, 1] * SPREAD

    def step(self, *, hint: bool = True, **batch: Iterable[int]) -> None:
        """Run a step with new tokens by request; a new request is admitted with all of them."""
        setup, new = self.setup, {}
        for name, tokens in batch.items():
            tokens = list(tokens)
            if name not in self.requests:
                admission = self.cache.admit(name, tokens)
                self.requests[name], self.histories[name] = (
                    admission.request,
                    tokens[: admission.hit],
                )
                self.hits[name], tokens = admission.hit, tokens[admission.hit :]
            new[name] = tokens
        parts = [self.numbers(t, len(self.histories[name])) for name, t in new.items()]
        wide = torch.cat([torch.cat(part, 1) for part in parts])  # so rows are not contiguous
        values, scores = wide[:, : self.columns], wide[:, self.columns :]
        with (
            self.cache.step({self.requests[name]: t for name, t in new.items()}) as step,
            checked(),
        ):
            tables = Tables.of(step.tensors(setup.device), setup.kind, setup.tail.name)
            if self.backwards:
                tables = dataclasses.replace(tables, ends=tables.ends.flip(0))
            compress(
                self.compressor, self.cache.tail(setup.tail.name, 0), self.rows, values, scores,
                tables, cos=self.cos, sin=self.sin, longest=step.longest if hint else None,
                arch=setup.arch,
            )  # fmt: skip
        for name, tokens in new.items():
            self.histories[name] = self.histories[name] + tokens

    def steps(self, name: str, tokens: Sequence[int], cuts: Iterable[int]) -> None:
        """Append the tokens of one request in steps that end at `cuts`."""
        begin = len(self.histories.get(name, ()))
        for end in (*cuts, len(tokens)):
            if begin < end:
                self.step(**{name: tokens[begin:end]})
                begin = end

    def back(self, name: str, count: int) -> None:
        self.cache.rollback(self.requests[name], count)
        self.histories[name] = self.histories[name][:-count]

    @property
    def rows(self) -> Rows:
        return self.cache.rows(self.setup.kind, 0)

    def entries(self, name: str) -> torch.Tensor:
        """Bytes of all complete entries of a request, data and scales."""
        count = len(self.histories[name]) // self.setup.tail.ratio
        numbers = torch.arange(count)
        blocks = torch.tensor(list(self.requests[name].blocks))
        place = blocks[numbers // self.rows.rows], numbers % self.rows.rows
        return torch.cat((self.rows.data().cpu()[place], self.rows.scales().cpu()[place]), 1)

    def live(self, name: str) -> list[torch.Tensor]:
        """Bytes of the tail that a request still needs."""
        tail, layout = self.setup.tail, self.setup.layout
        state = self.cache.storage.pools[Pool.STATES][self.requests[name].state].cpu()
        begin = layout.offset(tail.name, 0)
        runs = tail.live(len(self.histories[name]), layout.draft)
        return [state[begin + offset : begin + offset + size] for offset, size in runs]

    def check_history(self, name: str) -> None:
        """Compare bf16 entries with the whole history in fp64."""
        history = self.histories[name]
        exact = self.exact(*self.numbers(history))
        found = self.entries(name).view(torch.bfloat16).double()
        bound = HALF_ULP * exact.abs() * 1.01 + NOISE * exact.abs().amax(-1, keepdim=True)
        error = (found - exact).abs()
        assert (error <= bound).all(), f"{(error / bound).max():.2f} of the bound"

    def exact(self, values: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Entries of a whole history, fp64, by the formula."""
        tail, entries = self.setup.tail, []
        values, scores = values.cpu().double(), scores.cpu().double()
        ape = self.compressor.ape.cpu().double()
        weight, ratio, width = self.compressor.weight.cpu().double(), tail.ratio, tail.width
        for entry in range(len(values) // ratio):
            rows, logits = [], []
            for behind in range(min(tail.overlap, entry + 1)):  # no windows precede the first
                window = range((entry - behind) * ratio, (entry - behind + 1) * ratio)
                begin = (tail.overlap - 1 - behind) * width
                for position in window:
                    columns = slice(begin, begin + width)
                    rows.append(values[position, columns])
                    logits.append(scores[position, columns] + ape[position % ratio, columns])
            shares = torch.softmax(torch.stack(logits), 0)
            pooled = (shares * torch.stack(rows)).sum(0)
            x = pooled / (pooled.square().mean() + EPS).sqrt() * weight
            angle = torch.complex(*(t[entry * ratio].cpu().double() for t in (self.cos, self.sin)))
            rope = torch.view_as_complex(x[-ROPE:].view(-1, 2)) * angle
            x = torch.cat((x[:-ROPE], torch.view_as_real(rope).flatten()))
            if self.setup.kind == "index":
                x = sylvester(width) @ x / width**0.5
            entries.append(x)
        return torch.stack(entries)


def check_cuts(setup: Setup, total: int, cuts: Iterable[Sequence[int]]) -> None:
    """Check that every cut gives the entries and the live rows of one single step."""
    tokens = [7 * i % 13 for i in range(total)]
    whole = Runner(setup)
    whole.step(a=tokens)
    if setup.record == "bf16":
        whole.check_history("a")
    for cut in cuts:
        other = Runner(setup)
        other.steps("a", tokens, cut)
        check_same(whole, other, "a")


def check_rollback(setup: Setup, steps: int, every: int) -> None:
    """Check that rolled-back drafts, over windows, blocks and wraps of the tail, leave nothing.
    Contents are compared after every `every` steps."""
    runner, accepted, draft = Runner(setup), [i % 3 for i in range(121)], setup.draft
    runner.step(a=accepted)
    for at in range(steps):
        proposed = [(at + k) % 10 for k in range(draft)]
        runner.step(a=proposed)
        back = at % draft + 1
        runner.back("a", back)
        accepted = [*accepted, *proposed[: draft - back], at % 4]
        runner.step(a=[at % 4])
        assert runner.histories["a"] == accepted
        if at % every == every - 1:
            other = Runner(setup)
            other.step(a=accepted)
            check_same(runner, other, "a")


def check_same(one: Runner, other: Runner, name: str) -> None:
    assert one.histories[name] == other.histories[name]
    assert_equal(one.entries(name), other.entries(name))
    for mine, theirs in zip(one.live(name), other.live(name), strict=True):
        assert_equal(mine, theirs)


# -- calls by hand --------------------------------------------------------------------------------


def poisoned_job(setup: Setup, record: str | None = None, *, seed: int = 0) -> Job:
    """A step of four requests, one of them padding and one without tokens, over pools whose slots
    are not contiguous; every number that may not be read is NaN."""
    runner, tail = Runner(setup), setup.tail
    layout = setup.layout
    requests = [("a", 5), ("b", 2 * tail.ratio + 3), ("c", tail.ratio - 1)]
    names = {}
    for index, (name, count) in enumerate(requests):
        admission = runner.cache.admit(name, [index] * count)
        names[admission.request] = [index] * count
    with runner.cache.step(names) as step:
        arrays = step.tensors("cpu")
    place = layout.place(setup.kind, 0)
    chosen = place.record if record is None else FORMATS[record].record
    states = poisoned(8, layout.state_bytes, setup.device, seed)
    size = place.rows * chosen.bytes + 96
    pool = poisoned(len(runner.cache.storage.pools[Pool.BLOCKS]), size + size % 16, setup.device)
    out = Rows(pool, 16, 16 + place.rows * chosen.data_bytes, place.rows, chosen)
    mine = dataclasses.replace(runner.cache.tail(tail.name, 0), pool=states)
    tables = Tables.of(arrays, setup.kind, tail.name)
    padded = padding(tables, int(step.cu_tokens[-1]))
    values, scores = normal(
        2, len(padded.positions), runner.columns, seed=seed, device=setup.device
    )
    device = torch.device(setup.device)
    moved = Tables(*(table.to(device) for table in padded.named.values()))
    return Job(
        runner.compressor, mine, out, values, scores * SPREAD, moved, runner.cos, runner.sin,
        step.longest,
    )  # fmt: skip


def padding(tables: Tables, tokens: int, more: int = 3) -> Tables:
    """Extend tables as `Step.fill` leaves buffers that are larger than the step."""
    behind = {"cu_tokens": tokens, "state_slots": -1, "ends": -1, "tail_rows": -1, "entries": -1}
    found = {}
    for name, table in tables.named.items():
        rest = torch.full((more,), behind.get(name, 0), dtype=table.dtype)
        found[name] = torch.cat((table, rest))
    return Tables(**found)


def copied(job: Job) -> Job:
    """Copy a job with its pools."""
    tail, out = (
        dataclasses.replace(rows, pool=around(rows.pool).clone()[:, BESIDE:-BESIDE])
        for rows in (job.tail, job.out)
    )
    return dataclasses.replace(job, tail=tail, out=out)


def run(job: Job, **place: str) -> None:
    with checked():
        compress(**vars(job), **place)


def assert_same_pools(one: Job, other: Job) -> None:
    assert torch.equal(one.tail.pool, other.tail.pool)
    assert torch.equal(one.out.pool, other.out.pool)


def written(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (slot, row) of the entries that the step completes."""
    numbers = job.tables.entries[job.tables.ends[job.tables.ends >= 0].long()]
    return numbers // job.out.rows, numbers % job.out.rows


def check_poisoned(setup: Setup) -> None:
    """Compare the bytes of the tail and those outside the entries with the reference; entries must
    be close to it."""
    job = poisoned_job(setup)
    expected = copied(job)
    run(job, arch=setup.arch)
    reference.compress(expected)
    place = written(job)
    if "bf16" in job.out.record.name:
        mine, theirs = (
            rows.data()[place].view(torch.bfloat16).float() for rows in (job.out, expected.out)
        )
        torch.testing.assert_close(mine, theirs, rtol=2.0**-7, atol=1e-4)
    for part in (job.out.data(), job.out.scales()), (expected.out.data(), expected.out.scales()):
        for view in part:
            view[place] = 0
    assert_equal(around(job.out.pool), around(expected.out.pool))
    if setup.online:
        for mine, theirs in zip(job.tail.parts(), expected.tail.parts(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)
            mine.copy_(theirs)
    assert_equal(around(job.tail.pool), around(expected.tail.pool))
