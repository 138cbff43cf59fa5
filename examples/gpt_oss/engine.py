"""Requests from prompt to tokens: admit, prefill, decode all that are there, retire; greedily.

A step of the engine is either a prefill of what waits or a token for every request. A decoding step
is one CUDA graph for each number of requests, and the next one is launched before the host has read
the tokens of this one: they are on the device already, and the cache's books hear later which they
are. So the GPU does not wait for the host, which is a step behind. A prefill of few tokens is
padded to one of few sizes, and is a CUDA graph, too: launch by launch the host takes longer than
the GPU.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from examples.gpt_oss.cache import (
    Decoding,
    Kept,
    PaddedPrefill,
    Prefill,
    PromptShape,
    SharedPrefill,
)
from examples.gpt_oss.model import Model
from kernelkit.call.tensors import brought
from kvcache import Placeholders, Request, Step

PREFILL, DECODE = "prefill", "decode"
# Sizes of padded prefills: at most an eighth is padding, from 512 tokens on.
PADDED = (16, 32, *range(64, 1024, 64), *range(1024, 2048, 128), *range(2048, 4097, 256))


@dataclass(eq=False)
class Job:
    """A prompt and the tokens that follow it. hit: tokens of the prompt that were there already;
    logits: [V] for each new token, where the engine keeps them."""

    name: str
    prompt: list[int]
    new_tokens: int
    found: list[int] = field(default_factory=list)
    hit: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)
    request: Request | None = None

    @cached_property
    def ids(self) -> np.ndarray:
        """The prompt as int64, which is quicker to hash and to bring to a GPU than a list."""
        return np.array(self.prompt, np.int64)

    @property
    def held(self) -> Request:
        """Return the cache's request; the job must be admitted."""
        assert self.request is not None, f"{self.name} is not admitted"
        return self.request

    @property
    def coming(self) -> int:
        """Number of requested new tokens not yet found: 1 while a step is in flight, else 0.

        The new token of a step follows the prompt's tokens and those found. The last of them is the
        input of the step.
        """
        return self.held.length - (len(self.prompt) + len(self.found) - 1)

    @property
    def waiting(self) -> int:
        """Tokens of the prompt that are not in the cache."""
        return len(self.prompt) - self.held.length

    def is_over(self, stop: Sequence[int]) -> bool:
        """Whether there are all tokens, or one that ends the text."""
        return len(self.found) >= self.new_tokens or self.found[-1] in stop


@dataclass(frozen=True)
class Took:
    """A step of the engine: PREFILL or DECODE, requests, their tokens, seconds of the host until it
    knew the new ones."""

    kind: str
    requests: int
    tokens: int
    seconds: float


@dataclass(frozen=True, eq=False)
class Flight:
    """A decoding step in flight.

    Attributes:
        ids: int64 [B] in host memory, new tokens of `jobs` once `landed` has occurred.
        logits: [B, V] if they are kept.
    """

    jobs: list[Job]
    ids: torch.Tensor
    landed: torch.cuda.Event | None
    logits: torch.Tensor | None

    def tokens(self) -> list[int]:
        """Waits for them."""
        if self.landed is not None:
            self.landed.synchronize()
        return self.ids.tolist()


class TokenStep:
    """A decoding step of `batch` requests: tokens in `ids`, and behind it the next ones.

    On a GPU, with `graph`, the first run captures all of it, and later ones replay.
    """

    def __init__(self, model: Model, kept: Kept, batch: int, graph: bool) -> None:
        self.model, self.decoding = model, Decoding(kept, batch)
        self.ids = torch.zeros(batch, dtype=torch.int64, device=model.device)
        self.captures = graph
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        """Replace `ids` by the most likely next tokens; `logits` [B, V] are their logits."""
        if not self.captures:
            self._forward()
            return
        if self._graph is None:
            given = self.ids.clone()
            # What a step writes to the cache, it writes again; `ids` are put back.
            self._graph = captured(self._forward, lambda: self.ids.copy_(given))
        self._graph.replay()

    def flight(self, jobs: list[Job], keep_logits: bool) -> Flight:
        """Start copying the results of `run` to the host; later runs do not affect the copy."""
        on_gpu = self.ids.device.type == "cuda"
        ids = torch.empty_like(self.ids, device="cpu", pin_memory=on_gpu)
        ids.copy_(self.ids, non_blocking=on_gpu)
        landed = torch.cuda.Event() if on_gpu else None
        if landed is not None:
            landed.record()
        return Flight(jobs, ids, landed, self.logits.clone() if keep_logits else None)

    def _forward(self) -> None:
        self.decoding.prepare()
        positions, decoding = self.decoding.tables["positions"], self.decoding
        self.logits = self.model.decoded(self.ids, positions, decoding, decoding)
        self.model.choose(self.logits, self.ids)


class PromptStep:
    """A prefill of prompts in tables of fixed size; on a GPU, with `graph`, one CUDA graph.

    logits: [B, V] of the last token of each request.
    newest: int64 [B], the most likely tokens.
    """

    def __init__(
        self, model: Model, kept: Kept, shape: PromptShape, graph: bool, pool: Pool | None
    ) -> None:
        self.model, self.prefill = model, PaddedPrefill(kept, shape)
        self._graph: torch.cuda.CUDAGraph | None = None
        if graph:
            self.prefill.fill(None)
            self._graph = captured(self._forward, pool=pool)

    def run(self, step: Step, ids: Sequence[np.ndarray]) -> None:
        """Append the tokens of a step; replace `logits` and `newest`."""
        self.prefill.fill(step, ids)
        if self._graph is None:
            self._forward()
        else:
            self._graph.replay()

    def _forward(self) -> None:
        tables, attend = self.prefill.tables, self.prefill.attend
        self.logits = self.model(tables["ids"], tables["positions"], attend, tables["last"])
        self.newest = self.model.chosen(self.logits)


Pool = Any  # of the memory that graphs share; see torch.cuda.graph_pool_handle


def captured(
    forward: Callable[[], None],
    put_back: Callable[[], object] = lambda: None,
    pool: Pool | None = None,
) -> torch.cuda.CUDAGraph:
    """Return a graph of `forward`, which runs twice before, since then everything compiles.

    put_back: called after each of these runs.
    pool: memory that the graph shares with others, whose results are lost when it runs.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            forward()
            put_back()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        forward()
    return graph


class Engine:
    """Continuous batching of `model`.

    Args:
        requests: Maximum number of requests at a time; others wait.
        tokens: Maximum number of tokens of a request, prompt and new ones together.
        chunk: Maximum number of tokens of a prefill; a prompt that ranks share is not limited.
        graph: Whether decoding steps and padded prefills are CUDA graphs; None: on a GPU.
        padded: Prefills of at most so many tokens are padded to one of the sizes `PADDED`; 0: none,
            None: all sizes, if they are graphs.
        share: Whether prompts reuse cached tokens of others with the same beginning.
        keep_logits: Whether jobs get the logits of every new token.
    """

    def __init__(
        self,
        model: Model,
        *,
        requests: int,
        tokens: int,
        chunk: int = 8192,
        graph: bool | None = None,
        padded: int | None = None,
        share: bool = True,
        keep_logits: bool = False,
    ) -> None:
        on_gpu = model.device.type == "cuda"
        if graph and not on_gpu:
            raise ValueError(f"a CUDA graph of a model on {model.device}: graphs are for GPUs")
        self.shares_context = model.ranks is not None and model.ranks.context
        if self.shares_context and share:
            raise ValueError("context parallelism: prompts are computed whole, with share=False")
        self.model, self.requests, self.tokens, self.chunk = model, requests, tokens, chunk
        self.graph, self.keep_logits = on_gpu if graph is None else graph, keep_logits
        self.kept = Kept(
            model.config, requests, tokens, device=model.device, dtype=model.dtype, share=share
        )
        self.queue: deque[Job] = deque()
        self.running: list[Job] = []
        self.took: list[Took] = []
        self.padded = (PADDED[-1] if self.graph else 0) if padded is None else padded
        self._steps: dict[int, TokenStep] = {}
        self._prompt_steps: dict[PromptShape, PromptStep] = {}
        self._pool: Pool | None = None
        self._flight: Flight | None = None
        self._spent = 0.0  # seconds since the last step that `took` tells of

    def submit(self, name: str, prompt: Sequence[int], new_tokens: int) -> Job:
        """Queue a request; raise ValueError if it does not fit."""
        if not len(prompt) or new_tokens < 1:
            raise ValueError(f"{name}: {len(prompt)} tokens and {new_tokens} new ones, 1 at least")
        if len(prompt) + new_tokens > self.tokens:
            raise ValueError(
                f"{name}: {len(prompt)} tokens and {new_tokens} new ones, {self.tokens} at most"
            )
        job = Job(name, list(prompt), new_tokens)
        self.queue.append(job)
        return job

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """New tokens for each prompt, all of them served."""
        jobs = [self.submit(f"request {n}", prompt, new_tokens) for n, prompt in enumerate(prompts)]
        while self.step():
            pass
        return [job.found for job in jobs]

    def step(self) -> bool:
        """Admit, then prefill, or launch a decoding step and read what the one before it gave, then
        retire; False where there is nothing to do."""
        began = time.perf_counter()
        while self.queue and len(self.running) < self.requests:
            job = self.queue.popleft()
            admission = self.kept.cache.admit(job.name, job.ids)
            job.request, job.hit = admission.request, admission.hit
            self.running.append(job)
        if not self.running:
            return False
        new = [job for job in self.running if not job.found]
        prefills = bool(new) and self._flight is None
        prefill = self._prefill_shared if self.shares_context else self._prefill
        if prefills:
            requests, tokens = prefill(new)
        else:
            requests = tokens = self._decode(launch=not new)
        self._spent += time.perf_counter() - began
        if tokens:
            kind = PREFILL if prefills else DECODE
            self.took.append(Took(kind, requests, tokens, self._spent))
            self._spent = 0.0
        self._retire()
        return True

    def _retire(self) -> None:
        stop = self.model.config.stop
        for job in [job for job in self.running if job.found and job.is_over(stop)]:
            self.kept.cache.free(job.held)
            self.running.remove(job)

    def _prefill(self, jobs: Sequence[Job]) -> tuple[int, int]:
        """The next tokens of prompts, `chunk` of all together at most: of how many requests, how
        many.

        A piece leaves a checkpoint where other prompts can begin, and needs not end there.
        """
        cache, room, batch, share = self.kept.cache, self.chunk, {}, self.kept.share
        for job in jobs:
            if not room:
                break
            count = cache.manager.room(job.held, min(room, job.waiting), marks=share)
            batch[job.held] = job.ids[job.held.length :][:count]
            room -= count
        ids = [*batch.values()]
        padded = self._padded(self.chunk - room, [job.held.length for job in jobs[: len(batch)]])
        with cache.step(batch, marks=share) as step:
            if padded is not None:
                padded.run(step, ids)
                logits, newest = padded.logits, padded.newest
            else:
                attend = Prefill.of(self.kept, step)
                flat = brought(torch.from_numpy(np.concatenate(ids)), self.model.device)
                logits = self.model(flat, attend.at["positions"], attend, attend.last)
                newest = self.model.chosen(logits)
        done = [(place, job) for place, job in enumerate(jobs[: len(batch)]) if not job.waiting]
        self._note(done, newest.tolist(), logits.clone() if self.keep_logits else None)
        return len(batch), self.chunk - room

    def _padded(self, tokens: int, starts: Sequence[int]) -> PromptStep | None:
        """Return the step for so many tokens of requests that have `starts` tokens in the cache."""
        if tokens > self.padded or self.model.ranks is not None:
            return None
        size = PADDED[bisect_left(PADDED, tokens)]
        shape = PromptShape(size, len(starts), any(starts))
        if shape not in self._prompt_steps:
            if self.graph and self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            made = PromptStep(self.model, self.kept, shape, self.graph, self._pool)
            self._prompt_steps[shape] = made
        return self._prompt_steps[shape]

    def _prefill_shared(self, jobs: Sequence[Job]) -> tuple[int, int]:
        """Prefill a whole prompt, of which each rank computes its part."""
        job, ranks = jobs[0], self.model.ranks
        assert ranks is not None
        with self.kept.cache.step({job.held: job.ids}) as step:
            attend = SharedPrefill(self.kept, step, ranks)
            places = attend.places
            ids = brought(torch.from_numpy(job.ids)[places], self.model.device)
            source, place = attend.last
            wanted = brought(torch.tensor([place if source == ranks.rank else 0]), ids.device)
            positions = brought(places, ids.device)
            logits = ranks.agreed(self.model(ids, positions, attend, wanted), source)
            newest = self.model.chosen(logits)
        self._note([(0, job)], newest.tolist(), logits.clone() if self.keep_logits else None)
        return 1, len(job.prompt)

    def _decode(self, launch: bool) -> int:
        """Launch a step for every request if `launch`, then read the previous step.

        Returns the number of tokens that arrived, one per request.
        """
        before = self._flight
        due = [job for job in self.running if len(job.found) + job.coming < job.new_tokens]
        if not (launch and due):
            self._flight = None
            return self._landed(before)
        if before is not None and before.jobs == due:
            self._flight = self._launched(due, known=False)
            return self._landed(before)
        # Others than before: their tokens have to be known first, and some are over then.
        self._flight, count = None, self._landed(before)
        self._retire()
        due = [job for job in due if job in self.running]
        if due:
            self._flight = self._launched(due, known=True)
        return count

    def _launched(self, jobs: list[Job], known: bool) -> Flight:
        """Launch a step after the newest token of each job.

        known: whether the host has the token; else the previous step of these jobs left it on the
        device.
        """
        count = len(jobs)
        if count not in self._steps:
            self._steps[count] = TokenStep(self.model, self.kept, count, self.graph)
        step = self._steps[count]
        if known:
            newest = torch.tensor([job.found[-1] for job in jobs])
            step.ids.copy_(brought(newest, self.model.device))
        batch = {job.held: job.found[-1:] if known else Placeholders() for job in jobs}
        with self.kept.cache.step(batch) as plan:
            step.decoding.fill(plan)
            step.run()
        return step.flight(jobs, self.keep_logits)

    def _landed(self, flight: Flight | None) -> int:
        """Wait for a step and record its tokens; return their number."""
        if flight is None:
            return 0
        places = [(place, job) for place, job in enumerate(flight.jobs) if job in self.running]
        tokens = flight.tokens()
        self._note(places, tokens, flight.logits)
        for place, job in places:
            if job.held.unknown:  # the next step was given this token
                self.kept.cache.resolve(job.held, tokens[place : place + 1])
        return len(places)

    def _note(
        self, jobs: Sequence[tuple[int, Job]], tokens: Sequence[int], kept: torch.Tensor | None
    ) -> None:
        """Record new tokens and logits of jobs, whose indices in `tokens` are given."""
        for place, job in jobs:
            job.found.append(tokens[place])
            if kept is not None:
                job.logits.append(kept[place])
