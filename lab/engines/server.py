"""A server of an engine as a process, and the load that tests put on it."""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.engines import sglang_options
from lab.engines.environment import Environment
from lab.engines.harness.observe import FOLDER, read
from lab.engines.run import EngineError, end
from lab.engines.scenarios import SPAWNED
from lab.house.source import ROOT

START = 300  # seconds until a server answers


@dataclass(frozen=True)
class Kind:
    """A server of an engine.

    command: words after the environment's Python, for (model's folder, port)
    variables: of its process
    health: path that answers 200 once requests are taken
    idle: reads the pages that `metrics` names; whether no request and no block of the cache is left
    """

    command: Callable[[str, int], list[str]]
    variables: Mapping[str, str]
    health: str
    metrics: str
    left: Sequence[str]


VLLM = Kind(
    lambda model, port: [
        "-m", "vllm.entrypoints.cli.main", "serve", model, "--attention-backend",
        "BLACKWELL_KERNELS", "--skip-tokenizer-init", "--enforce-eager", "--dtype", "bfloat16",
        "--max-model-len", "128", "--max-num-seqs", "8", "--max-num-batched-tokens", "64",
        "--kv-cache-memory-bytes", str(4 << 20), "--block-size", "16",
        "-cc", json.dumps({"custom_ops": ["none"]}), "--host", "127.0.0.1", "--port", str(port),
    ],
    SPAWNED,
    "/health",
    "/metrics",
    ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting"),
)  # fmt: skip
SGLANG = Kind(sglang_options.server_words, {}, "/health", "/metrics", sglang_options.LEFT)
KINDS = {"vllm": VLLM, "sglang": SGLANG}


@dataclass(frozen=True)
class Server:
    """A server that runs.

    place: folder with its log and the records of its calls
    """

    engine: str
    model: str
    url: str
    place: Path
    process: subprocess.Popen = field(repr=False)

    def page(self, path: str) -> str:
        """Return what a path answers."""
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return answer.read().decode()

    def left(self) -> dict[str, float]:
        """Return what requests hold, by metric, all 0 where nobody is served. Several engines of
        one server are summed."""
        text, found = self.page(KINDS[self.engine].metrics), {}
        for name in KINDS[self.engine].left:
            values = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
            if not values:
                raise EngineError(f"{KINDS[self.engine].metrics} has no {name}")
            found[name] = sum(map(float, values))
        return found

    def settled(self, seconds: float = 60) -> dict[str, float]:
        """Wait until nothing is left, at most so long; return what is left then."""
        end = time.monotonic() + seconds
        while any((left := self.left()).values()) and time.monotonic() < end:
            time.sleep(0.5)
        return left

    def calls(self) -> list[dict[str, Any]]:
        """Return the records of the server's processes."""
        return read(self.place / "calls")


@contextmanager
def serving(
    environment: Environment, engine: str, model: str, name: str,
    variables: Mapping[str, str] | None = None, words: Sequence[str] = (),
) -> Iterator[Server]:  # fmt: skip
    """A server of `model` until the block ends, with further words of its command.

    Raises:
        EngineError: if it ends or does not answer within START seconds.
    """
    kind, place = KINDS[engine], environment.folder / "runs" / f"{engine}-serve-{name}"
    place.mkdir(parents=True, exist_ok=True)
    for old in (place / "calls").glob("*"):
        old.unlink()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = str(environment.models / model)
    given = environment.variables() | dict(kind.variables) | dict(variables or {})
    with (place / "log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [environment.python, *kind.command(folder, port), *words], stdout=log,
            stderr=subprocess.STDOUT, env=given | {FOLDER: str(place / "calls")}, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
        server = Server(engine, folder, f"http://127.0.0.1:{port}", place, process)
        try:
            _wait(server, kind.health)
            yield server
        finally:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            end(process)


def _wait(server: Server, path: str) -> None:
    end = time.monotonic() + START
    while time.monotonic() < end:
        if server.process.poll() is not None:
            break
        try:
            server.page(path)
        except (urllib.error.URLError, OSError):
            time.sleep(1)
        else:
            return
    tail = (server.place / "log").read_text(encoding="utf-8", errors="replace")[-3000:]
    raise EngineError(f"no answer; the end of {server.place / 'log'}:\n{tail}")


def requests(count: int, seed: int, longest: int = 90) -> list[dict[str, Any]]:
    """Draw requests of random lengths, a third of them with a prefix of another one; one of seven
    leaves before its answer is complete."""
    drawn, made = random.Random(seed), []
    for _ in range(count):
        length = drawn.randint(1, longest)
        prompt = [drawn.randint(3, 499) for _ in range(length)]
        if made and drawn.random() < 1 / 3:
            prompt = (drawn.choice(made)["prompt"] + prompt)[:longest]
        tokens = drawn.randint(1, 12)
        leaves = drawn.random() < 1 / 7
        made.append({
            "prompt": prompt, "tokens": tokens, "stream": leaves or drawn.random() < 0.5,
            "leave_after": drawn.randint(1, tokens) if leaves else None,
        })  # fmt: skip
    return made


def send(
    environment: Environment, server: Server, wanted: Sequence[dict[str, Any]], name: str,
    at_once: int = 8, kill_after: float | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Send requests from a process of its own; return its answers.

    kill_after: seconds after which the client is killed; there are no answers then.

    Raises:
        EngineError: if the client fails.
    """
    job = {"engine": server.engine, "url": server.url, "model": server.model,
           "at_once": at_once, "requests": wanted}  # fmt: skip
    files = server.place / f"{name}.job", server.place / f"{name}.result"
    files[0].write_text(json.dumps(job), encoding="utf-8")
    command = [environment.python, "-m", "lab.engines.client", *files]
    client = subprocess.Popen(
        command, env=environment.variables(), cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        _, errors = client.communicate(timeout=kill_after or 1800)
    except subprocess.TimeoutExpired:
        client.kill()
        client.communicate()
        if kill_after is None:
            raise
        return []
    if client.returncode:
        raise EngineError(f"the client failed: {errors[-2000:]}")
    return json.loads(files[1].read_text(encoding="utf-8"))
