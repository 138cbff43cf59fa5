"""Helpers that drive one cache step by step, for tests with expected results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lab.soak.driver import Driver, Live
from lab.soak.small_caches import CASES, Case


def cache(name: str, **changes: object) -> Driver:
    """Return the driver of a case with some fields changed."""
    return Driver(replace(CASES[name], **changes))


def tokens(count: int, variety: int = 0) -> list[int]:
    """Token ids, different for each `variety`."""
    return [(i * i + 3 * i) % 97 + 1000 * variety for i in range(count)]


def admitted(driver: Driver, prompt: Sequence[int], salt: bytes = b"") -> Live:
    """Admit a request, which has to find room."""
    (live,) = driver.admit_prompt(list(prompt), salt)
    driver.verify([live])
    return live


def appended(driver: Driver, live: Live, new: Sequence[int], chunk: int = 1 << 20) -> None:
    """Append tokens in chunks, each compared; no chunk passes over a checkpoint."""
    new = list(new)
    while new:
        room = driver.manager.room(live.request, min(chunk, len(new)))
        assert driver.append_tokens({live: new[:room]}) == [live]
        driver.verify([live])
        del new[:room]


def served(driver: Driver, prompt: Sequence[int], chunk: int = 1 << 20, salt: bytes = b"") -> Live:
    """Admit a request and append all of its prompt."""
    live = admitted(driver, prompt, salt)
    appended(driver, live, prompt[live.request.length :], chunk)
    return live


def freed(driver: Driver, live: Live) -> None:
    """Free a request."""
    driver.free(driver.live.index(live))
    driver.verify()


def image(driver: Driver, live: Live) -> dict[str, bytes]:
    """All bytes that a request needs, as they are in the pools."""
    return driver.machine.image(live.holder)


def case_names(*, deferred: bool = False, state: bool | None = None) -> list[str]:
    """Names of the cases with these properties."""

    def chosen(case: Case) -> bool:
        return case.deferred == deferred and state in (None, case.layout.has_state)

    return [name for name, case in CASES.items() if chosen(case)]
