"""The timeline of a launch: spans of warps and asynchronous units, written as a Perfetto trace.

Time is nominal: the cost that the scheduler gave to each step, in the order in which it ran them. A
trace shows which agent waits for which and what overlaps, never how long hardware would take.

File format: Chrome trace events in JSON, as ui.perfetto.dev and chrome://tracing open it; a CTA is
a process, an agent of it ("warp 4", "TMA", "tensor core") a thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TIME_UNIT = "nominal cycles (schedule order, not hardware time)"


@dataclass(frozen=True)
class Span:
    """`agent` of CTA `cta` was busy with `name` in [start, end).

    category: 'compute', 'wait', 'tma', 'mma' or any other word; viewers colour by it.
    args: numbers or short strings worth a look, such as the barrier waited for.
    """

    cta: int
    agent: str
    name: str
    start: float
    end: float
    category: str
    args: dict[str, object] = field(default_factory=dict)


@dataclass
class Trace:
    """Spans of a launch in the order in which they were recorded. time: unit of its times."""

    spans: list[Span] = field(default_factory=list)
    time: str = TIME_UNIT

    def span(
        self,
        cta: int,
        agent: str,
        name: str,
        start: float,
        end: float,
        category: str,
        **args: object,
    ) -> None:
        """Record that `agent` was busy with `name` in [start, end); ValueError if it ends early."""
        if end < start:
            raise ValueError(f"span {name!r} of {agent!r} ends at {end}, before its start {start}")
        self.spans.append(Span(cta, agent, name, start, end, category, args))

    def ctas(self) -> list[int]:
        """CTAs that left a span, in order."""
        return sorted({span.cta for span in self.spans})

    def agents(self, cta: int) -> list[str]:
        """Agents of a CTA: warps by number, then the asynchronous units by name."""
        return sorted({span.agent for span in self.spans if span.cta == cta}, key=_rank)

    def to_perfetto(self, path: str | Path) -> None:
        """Write the timeline as a trace-event JSON file."""
        document = {
            "traceEvents": [*self._names(), *self._events()],
            "displayTimeUnit": "ns",
            "otherData": {"time": self.time},
        }
        Path(path).write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")

    @classmethod
    def from_perfetto(cls, path: str | Path) -> Trace:
        """Read back what `to_perfetto` wrote; ValueError for a file that is something else."""
        try:
            return cls._of_events(json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"])
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            message = f"{path} is not a timeline of ptxemu: {type(error).__name__} {error}"
            raise ValueError(message) from error

    @classmethod
    def _of_events(cls, events: list[dict[str, Any]]) -> Trace:
        agents = {
            (event["pid"], event["tid"]): event["args"]["name"]
            for event in events
            if event["ph"] == "M" and event["name"] == "thread_name"
        }
        trace = cls()
        for event in events:
            if event["ph"] == "X":
                agent = agents[event["pid"], event["tid"]]
                start, end = event["ts"], event["ts"] + event["dur"]
                if not isinstance(end, int | float):
                    raise TypeError(
                        f"times {start!r:.80} and {event['dur']!r:.80}, expected numbers"
                    )
                what = (event["pid"], agent, event["name"], start, end, event["cat"])
                trace.spans.append(Span(*what, event["args"]))
        return trace

    def _names(self) -> Iterator[dict[str, Any]]:
        for cta in self.ctas():
            yield _metadata("process_name", cta, 0, {"name": f"CTA {cta}"})
            for thread, agent in enumerate(self.agents(cta)):
                yield _metadata("thread_name", cta, thread, {"name": agent})
                yield _metadata("thread_sort_index", cta, thread, {"sort_index": thread})

    def _events(self) -> Iterator[dict[str, Any]]:
        threads = {cta: {a: i for i, a in enumerate(self.agents(cta))} for cta in self.ctas()}
        for span in self.spans:
            yield {
                "ph": "X",
                "pid": span.cta,
                "tid": threads[span.cta][span.agent],
                "name": span.name,
                "cat": span.category,
                "ts": span.start,
                "dur": span.end - span.start,
                "args": span.args,
            }


def _metadata(name: str, process: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": args}


def _rank(agent: str) -> tuple[bool, str, int]:
    """Warps before units; "warp 10" after "warp 9"."""
    word, number = re.findall(r"^(.*?)\s*(\d*)$", agent)[0]
    return not word.startswith("warp"), word, int(number or 0)
