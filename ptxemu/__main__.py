"""`python -m ptxemu script.py`: an unmodified CuTe DSL script, with every launch emulated."""

from __future__ import annotations

import argparse
import faulthandler
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ptxemu.host.command_line import add_check_arguments, checking, write_json
from ptxemu.host.cutedsl import ARCH
from ptxemu.host.emulator import Emulator
from ptxemu.host.patching import environment
from ptxemu.host.runtime_symbols import Launcher
from ptxemu.options import POLICIES, Options


def main(arguments: list[str] | None = None) -> None:
    """Run the script or module; its exit code and exceptions leave through here unchanged.

    What a check finds goes to stderr; its errors make an exit code of 0 a 1.
    """
    options = _parser().parse_args(arguments)
    script, *rest = options.module or [options.script, *options.arguments]
    if script is None:
        _parser().error("a script or -m module is required")
    limit = options.limit if options.limit > 0 else None
    emulator = Emulator(Options(policy=options.policy, seed=options.seed, limit=limit))
    with checking(options, sys.stderr) as report:
        try:
            with machine_with_gpu(emulator):
                run_script(script, rest, is_module=bool(options.module))
        except SystemExit as ending:
            if ending.code:
                raise
        finally:
            if options.report:
                write_json(options.report, emulator.report, counts=True)
    if report.errors:
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ptxemu",
        description="Run a CuTe DSL script on a CPU: its kernels' PTX for sm_100a is emulated.",
    )
    parser.add_argument("--policy", choices=POLICIES, default=POLICIES[0], help="schedule of warps")
    parser.add_argument("--seed", type=int, default=0, help="of the random and adversarial policy")
    parser.add_argument(
        "--limit",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="refuse a launch estimated above this (default 60; 0: no limit)",
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write counts and findings as JSON"
    )
    add_check_arguments(parser)
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="run a module with its arguments"
    )
    parser.add_argument("script", nargs="?", help="the script, with all that follows for it")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


@contextmanager
def machine_with_gpu(launcher: Launcher) -> Iterator[None]:
    """While active, this process looks like one with a B200 whose launches go to `launcher`.

    The DSL reads its environment when it is first imported, so that must not have happened.
    """
    if "cutlass" in sys.modules:
        raise RuntimeError("cutlass is already imported: the DSL would not keep its PTX")
    with ExitStack() as stack:
        dump_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="ptxemu-"))
        stack.enter_context(environment(_dsl_environment(dump_dir)))
        from ptxemu.host.cuda_stubs import stubbed_cuda
        from ptxemu.host.device_view import cpu_as_device
        from ptxemu.host.interception import intercepted
        from ptxemu.host.torch_shim import torch_without_gpu

        pretences = stubbed_cuda(), cpu_as_device(), intercepted(launcher), torch_without_gpu()
        for pretence in pretences:
            stack.enter_context(pretence)
        faulthandler.enable()  # the DSL's own handler would hide where Python was
        yield


def _dsl_environment(dump_dir: str) -> dict[str, str]:
    """What makes the DSL target sm_100a and keep its PTX, besides what the user has set."""
    values = {}
    for prefix in ("CUTE_DSL", "CUTE_EXPERIMENTAL_DSL"):
        kept = {*filter(None, os.environ.get(f"{prefix}_KEEP", "").split(",")), "ptx"}
        values[f"{prefix}_KEEP"] = ",".join(sorted(kept))
        for name, default in (("ARCH", ARCH), ("DUMP_DIR", dump_dir)):
            values[f"{prefix}_{name}"] = os.environ.get(f"{prefix}_{name}", default)
    return values


def run_script(script: str, arguments: list[str], *, is_module: bool) -> None:
    """As the interpreter would: sys.argv and sys.path[0] are the script's own."""
    argv, path = sys.argv, sys.path[0]
    try:
        sys.argv = [script, *arguments]
        if is_module:
            sys.path[0] = os.getcwd()
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv, sys.path[0] = argv, path


if __name__ == "__main__":
    main()
