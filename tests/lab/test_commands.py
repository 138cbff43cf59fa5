"""Commands with names: the names that they know, what pages say about them, and emulate's
pictures.
"""

from __future__ import annotations

import json
import re

import pytest

from lab.commands import BENCH, CYCLES, DUMP, EMULATE, EXPLAIN, RUN, SOAK
from lab.flags.steps import FAMILIES, STEPS
from lab.house.source import ROOT
from lab.tools.command import ALSO, Command, main_of
from lab.tools.groups import ALL_ARCHS, SERVED

# Commands in READMEs, and in the scripts' docstrings; check.py and nsight.py take foreign flags.
SPELT = re.compile(r"^    python scripts/((?!check|nsight|run_)\w+\.py\b[^#\n]*)", re.MULTILINE)
PAGES = sorted((*ROOT.glob("*/README.md"), *ROOT.glob("scripts/*.py")))


def test_every_kernel_is_known_to_every_command():
    kernels = {"fmha", "gqa", "mla", "moe", "q8_0", *STEPS}
    for commands in (RUN, DUMP, EXPLAIN, EMULATE):
        assert kernels <= set(commands)
    assert {"fmha", "gqa", "mla", *FAMILIES} <= set(BENCH)


@pytest.mark.parametrize("script", ["run.py", "bench.py"])
def test_without_a_name_the_names_are_listed(run, script):
    listed = run(script, "--help").stdout
    assert listed.startswith(f"usage: {script} NAME [FLAGS]")
    assert "  gqa " in listed
    assert run(script).returncode == 2


@pytest.mark.parametrize(("other", "name"), ALSO.items())
def test_a_family_has_the_name_of_its_package_too(monkeypatch, other, name):
    seen = []
    monkeypatch.setattr(Command, "main", lambda self, program, words: seen.append(self) or 0)
    for commands in (RUN, DUMP, EXPLAIN, EMULATE, CYCLES, BENCH, SOAK):
        assert other not in commands
        assert main_of(commands, "", [other]) == (0 if name in commands else 2)
    assert seen == [
        commands[name]
        for commands in (RUN, DUMP, EXPLAIN, EMULATE, CYCLES, BENCH, SOAK)
        if name in commands
    ]


def archs_of(command: Command) -> set[str]:
    actions = command.parser("")._option_string_actions
    return set(actions["--arch"].choices) if "--arch" in actions else set()


def test_arch_is_every_one_that_the_operators_accept():
    """But `cycles.py`, which needs the parameters of a GPU."""
    from fmha.launch import ARCHS as OF_ATTENTION
    from gqa_lowlatency.launch import ARCHS as OF_DECODE
    from kernelkit.call.launch import _emulated_of
    from kernelkit.merge.launch import ARCHS as OF_MERGE
    from kvcache.movement.launch import ARCHS as OF_CACHE
    from mla.attention.choose import ARCHS as OF_LATENT
    from mla.indexer.scores_launch import ARCHS as OF_SCORES
    from moe.mixed.config import ARCHS as OF_EXPERTS
    from moe.routing.launch import ARCHS as OF_ROUTING
    from q8_0.launch import ARCHS as OF_Q8_0

    accepted = {
        "fmha": OF_ATTENTION, "gqa": OF_DECODE, "merge": OF_MERGE, "append": OF_CACHE,
        "kvcache": OF_CACHE, "mla": OF_LATENT, "score": OF_SCORES, "moe": OF_EXPERTS,
        "route": OF_ROUTING, "q8_0": OF_Q8_0,
    }  # fmt: skip
    for name, archs in accepted.items():
        wanted = {*_emulated_of(tuple(archs))}
        assert wanted in ({*ALL_ARCHS}, {*SERVED})
        for commands in (RUN, DUMP, EXPLAIN, EMULATE):
            assert name not in commands or archs_of(commands[name]) == wanted
    assert all({*SERVED} <= archs_of(CYCLES[name]) for name in ("fmha", "gqa", "moe", "append"))


def test_older_spellings_are_the_same_flags():
    parser = RUN["gqa"].parser("")
    new = "--batch 2 --kv-len 40,3 --kv-heads 1 --q-heads 3 --q-len 2 --head-dim 64 --no-causal"
    old = "--BS 2 --kvL 40,3 --kvH 1 --qH 3 --qL 2 --D 64 --full"
    assert parser.parse_args(new.split()) == parser.parse_args(old.split())
    assert "--kvL" not in parser.format_help()


@pytest.mark.parametrize("command", [
    command.strip() for page in PAGES for command in SPELT.findall(page.read_text(encoding="utf-8"))
])  # fmt: skip
def test_pages_spell_commands_that_there_are(run, monkeypatch, command):
    monkeypatch.setattr(Command, "perform", lambda self, options: 0)
    assert run(command).returncode == 0


def test_pages_spell_some_of_every_family():
    spelt = " ".join(SPELT.findall("".join(page.read_text(encoding="utf-8") for page in PAGES)))
    assert {"gqa", "moe", "kvcache", "plan.py"} <= set(spelt.split())


# -- emulate --------------------------------------------------------------------------------------


@pytest.fixture
def timeline(printed, tmp_path):
    """Return the printed text, and the events of the trace."""

    def call(command: str, *more: object):
        text = printed(f"emulate.py {command}", "--out", tmp_path / "t", *more)
        assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG\r\n")
        return text, json.loads((tmp_path / "t.json").read_text())["traceEvents"]

    return call


def test_attention_is_drawn(timeline, tmp_path):
    findings = tmp_path / "findings.json"
    text, events = timeline("fmha --shape 1,5,7,1,1", "--check-json", findings)
    assert "no findings in 1 launch; rules: hardware" in text
    assert json.loads(findings.read_text())["errors"] == 0
    agents = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {f"warp {warp}" for warp in range(6)} <= agents


def test_decode_is_drawn_with_the_names_of_its_plan(run, timeline):
    flags = "gqa --kv-len 40 --kv-heads 1 --q-heads 1 --head-dim 64"
    text, events = timeline(flags)
    assert "  load_kv " in text
    assert {"epilogue", "ring[0]", "wait kv[0]"} <= {event["name"] for event in events}
    assert run(f"emulate.py {flags} --launch 3").returncode == 2
