"""Implementation of `house.py support`: asks every function, and prints or writes the page."""

from __future__ import annotations

import argparse

from lab.house.source import ROOT
from lab.support.ask import ask
from lab.support.page import page
from lab.support.spaces import SPACES

PAGE = ROOT / "docs" / "support.md"


def perform(options: argparse.Namespace) -> int:
    """Return the exit code."""
    text = page({name: ask(space) for name, space in SPACES.items()})
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
        print(f"{PAGE.relative_to(ROOT)}: {len(text.splitlines())} lines")
        return 0
    print(text, end="")
    return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text)
