"""Requests from prompt to tokens: admit, prefill, decode all that are there, retire; greedily.

A step of the engine is either a prefill of what waits or a token for every request. Between two
steps the host reads the tokens, since books and callers want to know them; within one nothing
waits for the GPU, and a decoding step is one CUDA graph for each number of requests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from examples.gpt_oss.cache import Decoding, Kept, Prefill
from examples.gpt_oss.model import Model
from kernelkit.tensors import brought
from kvcache import Request

PREFILL, DECODE = "prefill", "decode"


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

    @property
    def held(self) -> Request:
        """Of the cache, once it is admitted."""
        assert self.request is not None, f"{self.name} is not admitted"
        return self.request

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
        """`ids` become the most likely next ones; `logits` [B, V] are those they come from."""
        if not self.captures:
            self._forward()
            return
        if self._graph is None:
            self._graph = self._captured()
        self._graph.replay()

    def _forward(self) -> None:
        self.decoding.prepare()
        self.logits = self.model(self.ids, self.decoding.tables["positions"], self.decoding)
        self.ids.copy_(self.logits.argmax(-1))

    def _captured(self) -> torch.cuda.CUDAGraph:
        """Everything compiles and allocates before: what a step writes to the cache, it writes
        again, so doing it thrice changes nothing but `ids`, which are put back."""
        given, stream = self.ids.clone(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._forward()
                self.ids.copy_(given)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._forward()
        return graph


class Engine:
    """Continuous batching of `model`.

    Args:
        requests: at a time; others wait.
        tokens: of a request, prompt and new ones together, at most.
        chunk: tokens of a prefill, at most.
        graph: whether decoding steps are CUDA graphs; None: on a GPU.
        share: whether prompts share what is kept of others with the same beginning.
        keep_logits: whether jobs get the logits of every new token.
    """

    def __init__(
        self,
        model: Model,
        *,
        requests: int,
        tokens: int,
        chunk: int = 8192,
        graph: bool | None = None,
        share: bool = True,
        keep_logits: bool = False,
    ) -> None:
        on_gpu = model.device.type == "cuda"
        if graph and not on_gpu:
            raise ValueError(f"a CUDA graph of a model on {model.device}: graphs are for GPUs")
        self.model, self.requests, self.tokens, self.chunk = model, requests, tokens, chunk
        self.graph, self.keep_logits = on_gpu if graph is None else graph, keep_logits
        self.kept = Kept(
            model.config, requests, tokens, device=model.device, dtype=model.dtype, share=share
        )
        self.queue: deque[Job] = deque()
        self.running: list[Job] = []
        self.took: list[Took] = []
        self._steps: dict[int, TokenStep] = {}
        self._fed: list[Job] = []  # whose newest tokens the ids of the step in turn are

    def submit(self, name: str, prompt: Sequence[int], new_tokens: int) -> Job:
        """A request that is served in its turn; ValueError for one that does not fit."""
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
        """Admit, then prefill or decode, then retire; False where there is nothing to do."""
        while self.queue and len(self.running) < self.requests:
            job = self.queue.popleft()
            admission = self.kept.cache.admit(job.name, job.prompt)
            job.request, job.hit = admission.request, admission.hit
            self.running.append(job)
        if not self.running:
            return False
        began = time.perf_counter()
        new = [job for job in self.running if not job.found]
        kind, counts = (PREFILL, self._prefill(new)) if new else (DECODE, self._decode())
        self.took.append(Took(kind, *counts, time.perf_counter() - began))
        stop = self.model.config.stop
        for job in [job for job in self.running if job.found and job.is_over(stop)]:
            self.kept.cache.free(job.held)
            self.running.remove(job)
        return True

    def _prefill(self, jobs: Sequence[Job]) -> tuple[int, int]:
        """The next tokens of prompts, `chunk` of all together at most: of how many requests, how
        many.

        A piece ends where a checkpoint is to be taken, so that other prompts can begin there.
        """
        cache, room, batch = self.kept.cache, self.chunk, {}
        for job in jobs:
            if not room:
                break
            count = cache.manager.room(job.held, min(room, job.waiting))
            batch[job.held] = job.prompt[job.held.length :][:count]
            room -= count
        with cache.step(batch) as step:
            attend = Prefill(self.kept, step)
            flat = torch.tensor([token for tokens in batch.values() for token in tokens])
            ids, positions = brought(flat, self.model.device), attend.at["positions"]
            logits = self.model(ids, positions, attend, attend.last)
            newest = logits.argmax(-1)
        done = [(place, job) for place, job in enumerate(jobs[: len(batch)]) if not job.waiting]
        self._note(done, newest.tolist(), logits)
        return len(batch), self.chunk - room

    def _decode(self) -> tuple[int, int]:
        """A token for every request: of how many, and how many."""
        jobs = self.running
        count = len(jobs)
        if count not in self._steps:
            self._steps[count] = TokenStep(self.model, self.kept, count, self.graph)
        step = self._steps[count]
        if self._fed != jobs:
            newest = torch.tensor([job.found[-1] for job in jobs])
            step.ids.copy_(brought(newest, self.model.device))
        with self.kept.cache.step({job.held: job.found[-1:] for job in jobs}) as plan:
            step.decoding.fill(plan)
            step.run()
        self._note([*enumerate(jobs)], step.ids.tolist(), step.logits)
        self._fed = [*jobs]
        return count, count

    def _note(
        self, jobs: Sequence[tuple[int, Job]], tokens: Sequence[int], logits: torch.Tensor
    ) -> None:
        """New tokens of jobs, whose places among `tokens` are given, too."""
        kept = logits.clone() if self.keep_logits else None
        for place, job in jobs:
            job.found.append(tokens[place])
            if kept is not None:
                job.logits.append(kept[place])
