"""`under_load`: a server with a warm cache, random requests at once, some of which leave early."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.engines.environment import Environment
from lab.engines.judge import Reference
from lab.engines.server import requests, send, serving
from lab.house.source import ROOT

KILLED_AFTER = 6.0  # seconds until the second client is killed


@dataclass(frozen=True)
class Report:
    """What a load brought.

    answers: to each request, as `client` writes them
    wrong: a line for each request with a wrong token, or too few of them
    compiled: kernels that were compiled while requests waited
    left: what requests held after the last one, by metric of the server
    """

    answers: Sequence[Mapping[str, Any]]
    wrong: Sequence[str]
    compiled: Sequence[str]
    left: Mapping[str, float]

    @property
    def ok(self) -> bool:
        return not (self.wrong or self.compiled or any(self.left.values()))

    def facts(self) -> dict[str, Any]:
        """Return everything as JSON takes it."""
        return {name: getattr(self, name) for name in ("answers", "wrong", "compiled", "left")}

    def __str__(self) -> str:
        first = sorted(answer["seconds"] for answer in self.answers if answer["seconds"])
        gone = sum(answer["left"] for answer in self.answers)
        tokens = sum(len(answer["tokens"]) for answer in self.answers)
        return "\n".join((
            f"{len(self.answers)} requests, {tokens} tokens; {gone} left early",
            f"first token after {first[len(first) // 2]:.2f} s (median), {first[-1]:.2f} s at most",
            f"wrong: {len(self.wrong)}", *(f"    {line}" for line in self.wrong[:20]),
            f"compiled while requests waited: {len(self.compiled)}",
            *(f"    {line}" for line in self.compiled),
            f"held afterwards: {dict(self.left)}",
        ))  # fmt: skip


def warm(environment: Environment, engine: str, model: str) -> None:
    """Make the kernels of a server of this model.

    Raises:
        subprocess.CalledProcessError: if that fails.
    """
    command = [environment.python, "-m", "lab.engines.warm", engine, environment.models / model]
    subprocess.run(
        command, check=True, env=environment.variables(), cwd=ROOT, stdout=subprocess.DEVNULL
    )


def under_load(
    environment: Environment, engine: str, model: str, count: int, at_once: int, seed: int,
    variables: Mapping[str, str] | None = None, words: Sequence[str] = (),
) -> Report:  # fmt: skip
    """Send `count` requests, beside a second client that is killed, and judge every token.

    variables, words: of the server's process and of its command, beside those of all.

    Raises:
        EngineError: if the server or the first client fails.
    """
    warm(environment, engine, model)
    wanted = requests(count, seed)
    with serving(environment, engine, model, f"load-{model}", variables, words) as server:
        others = requests(4 * at_once, seed + 1)
        doomed = threading.Thread(
            target=send, args=(environment, server, others, "doomed", at_once, KILLED_AFTER)
        )
        doomed.start()
        answers = send(environment, server, wanted, "client", at_once)
        doomed.join()
        left = server.settled()
        compiled = [line["kernel"] for line in server.calls() if line["what"] == "compile"]
    return Report(answers, wrong(Reference(environment.models / model), wanted, answers),
                  compiled, left)  # fmt: skip


def wrong(
    reference: Reference, wanted: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Name the requests whose tokens are not those of the reference, or not as many as asked."""
    lines = []
    for number, (request, answer) in enumerate(zip(wanted, answers, strict=True)):
        count, least = len(answer["tokens"]), request["leave_after"] or request["tokens"]
        if not least <= count <= request["tokens"]:
            lines.append(f"request {number}: {count} tokens, {request['tokens']} were asked for")
        verdict = reference.judge(request["prompt"], [{"tokens": answer["tokens"]}])
        if not verdict.ok:
            lines.append(f"request {number}, prompt of {len(request['prompt'])}: {verdict}")
    return lines
