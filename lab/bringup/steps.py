"""The steps of a bring-up, from small to large, as data: command lines, limits, what they need.

A step is a command of this repository that ends with 0 where all is right, 1 where something is
wrong and 2 where it refuses, and writes its figures as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

from lab.bringup.assumptions import problems

HOPPER = "sm_90a"
ARCHS = ("sm_100a", "sm_103a", HOPPER)
# Whose verdict is the same whatever runs beside, so that several may run at a time.
CHECKS = ("instructions", "assumptions", "kernels", "random", "sanitizer", "model")
MEASURES = ("rates", "speed", "profiles")
JSON, FOLDER, ARCH = "{json}", "{folder}", "{arch}"  # places in a command line
NO_TIMES = "times of the emulator are no times"


@dataclass(frozen=True)
class Step:
    """A command of a process of its own.

    name: its group, a dot, and what it is.
    words: what it shows.
    argv: arguments of the interpreter, with placeholders JSON, FOLDER and ARCH.
    seconds: time after which it counts as hung.
    emulated: additional arguments in the emulator.
    why_not: why it cannot be emulated.
    quick: whether --quick includes it.
    needs: a program that must be installed.
    modules: Python packages that must be installed.
    """

    name: str
    words: str
    argv: tuple[str, ...]
    seconds: int = 120
    emulated: tuple[str, ...] = ()
    native: tuple[str, ...] = ()
    why_not: str = ""
    quick: bool = False
    peers: bool = False
    needs: str = ""
    modules: tuple[str, ...] = ()
    archs: tuple[str, ...] = ARCHS

    @property
    def group(self) -> str:
        return self.name.partition(".")[0]

    @property
    def checks(self) -> bool:
        return self.group in CHECKS

    @property
    def measures(self) -> bool:
        return self.group in MEASURES

    @property
    def on_host(self) -> bool:
        """Whether the step needs no GPU."""
        return self.group == "model"

    def command(self, arch: str, *, emulate: bool, places: dict[str, str]) -> list[str]:
        """Return the arguments of the interpreter, with placeholders replaced."""
        words = [*self.argv, *(self.emulated if emulate else self.native)]
        for mark, value in {**places, ARCH: arch}.items():
            words = [word.replace(mark, value) for word in words]
        return words


# Of run.py, on a GPU and in the emulator.
_NATIVE = ("--backend", "cuda")
_EMULATED = ("--backend", "emulate", "--arch", ARCH)
LARGE = "too large for the emulator"


def steps_of(arch: str) -> list[Step]:
    """All of an architecture, in the order in which they are run."""
    found = [*_doctor(), *_instructions(), *_assumptions(), *_kernels(), *_random(), *_sanitizer(),
             *_rates(), *_speed(), *_profiles(), *_model()]  # fmt: skip
    return [step for step in found if arch in step.archs]


def _doctor() -> Iterator[Step]:
    argv = ("-m", "lab.bringup.doctor", "--json", JSON)
    words = "GPU, driver, clocks, versions, limits, caches"
    yield Step("doctor.here", words, argv, 90, quick=True)


def _instructions() -> Iterator[Step]:
    yield Step(
        "instructions.forms",
        "programs of every form that shipped kernels use",
        ("-m", "lab.bringup.instructions", "--arch", ARCH, "--json", JSON),
        600, emulated=("--emulate",), quick=True,
    )  # fmt: skip
    yield Step(
        "instructions.conformance",
        "the whole conformance set of the emulator",
        ("scripts/conformance.py", "--accumulation", "aligned", "--json", JSON),
        1800, why_not="it compares a GPU with the emulator", modules=("cuda.bindings",),
    )  # fmt: skip


def _run(kind: str, name: str, flags: str, **more: object) -> Step:
    """A step of run.py, beside the reference."""
    step = Step(
        f"kernels.{name}", flags or "as by default",
        ("scripts/run.py", kind, *flags.split(), "--json", JSON),
        emulated=_EMULATED, native=_NATIVE,
    )  # fmt: skip
    return replace(step, **more)  # type: ignore[arg-type]


def _assumptions() -> Iterator[Step]:
    """Checks of tensor memory and its products, which Hopper has not."""
    for name, kind, flags, words in problems():
        step = _run(kind, name, flags, words=words, quick=True, archs=("sm_100a", "sm_103a"))
        yield replace(step, name=f"assumptions.{name}")


# Name -> (of run.py, flags): small, and such that each adds one thing.
SMALL = {
    "append": ("append", "--rows 33"),
    "gather": ("gather", "--rows 33"),
    "copy": ("copy", "--rows 5"),
    "checksum": ("checksum", "--rows 5"),
    "merge": ("merge", "--rows 40"),
    "route": ("route", "--rows 9"),
    "permutation": ("permutation", "--rows 40"),
    "combine": ("combine", "--rows 9"),
    "quantise": ("quantise", "--rows 9"),
    "fmha-base": ("fmha", "--schedule base --q-len 70 --kv-len 150 --head-dim 64"),
    "fmha-pingpong": ("fmha", "--schedule pingpong --q-len 300 --kv-len 300 --causal"),
    "fmha-128": ("fmha", "--q-len 300 --kv-len 300 --head-dim 128 --causal"),
    "fmha-256": ("fmha", "--q-len 130 --kv-len 260 --head-dim 256"),
    "fmha-mla": ("fmha", "--q-len 130 --kv-len 260 --head-dim 192,128 --causal"),
    "fmha-512": ("fmha", "--q-len 70 --kv-len 130 --head-dim 512 --q-heads 2 --kv-heads 1"),
    "fmha-window": ("fmha", "--q-len 300 --kv-len 300 --window 64,0 --sinks"),
    "fmha-pages": ("fmha", "--q-len 100 --kv-len 200 --page-size 64 --kv-lens 200,70"),
    "fmha-varlen": ("fmha", "--q-len 100 --kv-len 200 --varlen --causal"),
    "fmha-e4m3": ("fmha", "--q-len 130 --kv-len 200 --dtype e4m3 --scales"),
    "gqa-1": ("gqa", "--kv-len 300 --cluster 1"),
    "gqa-2": ("gqa", "--kv-len 600 --cluster 2"),
    "gqa-4": ("gqa", "--kv-len 1100 --cluster 4"),
    "gqa-8": ("gqa", "--kv-len 2100 --cluster 8 --batch 1 --q-heads 8 --kv-heads 1"),
    "gqa-16": ("gqa", "--kv-len 4100 --cluster 16 --batch 1 --q-heads 8 --kv-heads 1"),
    "gqa-parts": ("gqa", "--kv-len 1100 --cluster 2 --parts 2"),
    "gqa-pages": ("gqa", "--kv-len 500 --page-size 64"),
    "gqa-e4m3": ("gqa", "--kv-len 500 --kv-dtype e4m3 --scales"),
    "mla-warp": ("mla", "--kv-len 300 20 --heads 20 --tokens 2 --kernel warp --sinks"),
    "mla-e4m3": ("mla", "--kv-len 300 --e4m3 --kernel warp --parts 3"),
    "mla-listed": (
        "mla",
        "--operation sparse_decode --tokens 2 --record fp8_584 --chosen 100 "
        "--extra fp8_584 --kernel warp --rope --sinks",
    ),
    "q8_0": ("q8_0", "--shapes 136x256 --tokens 1 3 17 130"),
    "kvcache": ("kvcache", ""),
    "compress": ("compress", "--rows 9"),
    "query": ("query", "--rows 9"),
    "score": ("score", "--rows 3"),
    "topk": ("topk", "--rows 3"),
    "norm_rope": ("norm_rope", "--rows 9"),
}
QUICK = ("append", "merge", "route", "quantise", "fmha-base", "fmha-pingpong", "fmha-256",
         "fmha-e4m3", "gqa-1", "gqa-8", "gqa-16", "q8_0", "compress", "score", "topk")  # fmt: skip
# Products of experts: packed ones are Blackwell's, arranged ones run on both.
_LAYER = "--tokens 9 --hidden 256 --intermediate 128 --experts 6 --top-k 2"
_DSV4 = "--steps 2 --requests 1"
OF_BLACKWELL = {
    **{f"moe-{fmt}": ("moe", f"{_LAYER} --format {fmt}") for fmt in ("nvfp4", "mxfp8", "mxfp4")},
    "dsv4": ("dsv4", _DSV4),
}
OF_HOPPER = {
    **{f"moe-mxfp4-{name}": ("moe", f"{_LAYER} --format mxfp4 --activations {name}")
       for name in ("bf16", "e4m3")},
    "mla-wgmma": ("mla", "--kv-len 700 70 --heads 64 --kernel wgmma --cluster 4 --parts 2"),
    **{f"mla-wgmma-{record}": ("mla", f"--operation sparse_decode --record {record} --chosen 200 "
                                      "--tokens 2 --kernel wgmma")
       for record in ("fp8_584", "fp8_656", "fp8_528", "fp4_288", "bf16_512")},
    "dsv4": ("dsv4", f"{_DSV4} --experts 0"),
}  # fmt: skip
# Of models, on a GPU alone.
HEADLINES = {
    "fmha-4k": ("fmha", "--shape 2,4k,4k,16,16 --head-dim 128 --causal"),
    "fmha-gpt-oss": ("fmha", "--shape 1,2k,2k,64,8 --head-dim 64 --window 127,0 --sinks"),
    "gqa-8k": ("gqa", "--batch 1 --kv-len 8k --q-heads 64 --kv-heads 8"),
    "mla-8x8k": ("mla", "--kv-len" + " 8k" * 8 + " --heads 128 --unjudged"),
    "gqa-64x8k": ("gqa", "--batch 64 --kv-len 8k --q-heads 64 --kv-heads 8"),
    **{f"{name}-4k": (name, "--rows 4k") for name in ("append", "gather", "compress", "route")},
    **{f"{name}-1k": (name, "--rows 1k") for name in ("score", "topk")},
    "moe-gpt-oss": ("moe", "--model gpt-oss-120b --tokens 64 --format mxfp4 --activations bf16"),
}


def _kernels() -> Iterator[Step]:
    for name, (kind, flags) in SMALL.items():
        yield _run(kind, name, flags, quick=name in QUICK)
    for found, archs in ((OF_BLACKWELL, ("sm_100a", "sm_103a")), (OF_HOPPER, (HOPPER,))):
        for name, (kind, flags) in found.items():
            yield _run(kind, name, flags, archs=archs, quick=kind == "moe")
    for name, (kind, flags) in HEADLINES.items():
        quick = name in ("fmha-4k", "gqa-8k")
        yield _run(kind, name, flags, seconds=300, why_not=LARGE, quick=quick)


def _random() -> Iterator[Step]:
    for kind, archs in (("fmha", ARCHS), ("gqa", ARCHS), ("mla", ARCHS), ("moe", (HOPPER,))):
        yield Step(
            f"random.{kind}", "3,000 problems of 60 kernels",
            ("scripts/soak.py", kind, "--json", JSON), 900, archs=archs,
            native=("--backend", "cuda", "--configs", "60", "--problems", "3000",
                    "--minutes", "8"),
            emulated=(*_EMULATED, "--configs", "2", "--problems", "2", "--small"),
        )  # fmt: skip
        yield Step(
            f"random.{kind}-few", "300 problems of 12 kernels",
            ("scripts/soak.py", kind, "--json", JSON), 240, archs=archs,
            native=("--backend", "cuda", "--configs", "12", "--problems", "300",
                    "--minutes", "1"),
            why_not="the step above is as small in the emulator", quick=True,
        )  # fmt: skip
    yield Step(
        "random.kvcache", "20,000 operations of the cache's manager",
        ("scripts/soak.py", "kvcache", "--operations", "20k", "--json", JSON), 300,
        why_not="its work is the host's, which the tests do",
    )  # fmt: skip


SANITIZER = "compute-sanitizer"


def _sanitizer() -> Iterator[Step]:
    for name in ("append", "merge", "fmha-base", "gqa-1", "q8_0", "mla-warp", "mla-listed"):
        kind, flags = SMALL[name]
        yield Step(
            f"sanitizer.{name}", f"memcheck of {flags}",
            ("-m", "lab.bringup.under", SANITIZER, "--tool", "memcheck",
             "--report-api-errors", "no",  # the DSL asks for functions that a driver may not have
             "--error-exitcode", "1", "--", "scripts/run.py", kind, *flags.split(), *_NATIVE,
             "--json", JSON),
            300, why_not="the emulator has a checker of its own", needs=SANITIZER,
        )  # fmt: skip


def _rates() -> Iterator[Step]:
    yield Step(
        "rates.units", "issue, latency, barriers, copies, bandwidth, launches",
        ("scripts/bench.py", "units", "--json", JSON), 900,
        emulated=("--emulate", ARCH, "--every", "40"), quick=True,
    )  # fmt: skip
    yield Step(
        "rates.parameters", "the cycle model's parameters from them",
        ("-m", "lab.bringup.rates", f"{FOLDER}/rates.units.json", "--json", JSON),
        60, why_not=NO_TIMES, quick=True,
    )  # fmt: skip


def _speed() -> Iterator[Step]:
    alone: Sequence[tuple[str, str, str, bool]] = (
        ("gqa", "decode at 1 to 64 requests", "--peers decode --batch 1 8 64 --kv-len 1k 8k", True),
        ("fmha", "prompts of 16k tokens", "--peers fmha --rows anchor gpt-oss --rounds 2", False),
        ("kvcache", "what the cache moves", "", False),
        ("dsv4", "a layer of DeepSeek-V4 and its cache", "", False),
        ("merge", "merging", "", False),
        ("q8_0", "weights in Q8_0", "", False),
        ("moe", "steps of a MoE layer", "", False),
    )
    for kind, words, flags, quick in alone:
        yield Step(
            f"speed.{kind}", words, ("scripts/bench.py", kind, *flags.split(), "--json", JSON),
            600, why_not=NO_TIMES, quick=quick,
        )  # fmt: skip
    beside = {
        "gqa": "--batch 1 8 64 --kv-len 1k 8k",
        "fmha": "--rows anchor gpt-oss gqa --rounds 4",
    }
    for kind, flags in beside.items():
        yield Step(
            f"speed.{kind}-peers", "beside the libraries that are installed",
            ("scripts/bench.py", kind, *flags.split(), "--json", JSON), 900, why_not=NO_TIMES,
            peers=True,
        )  # fmt: skip


def _profiles() -> Iterator[Step]:
    for name in ("fmha", "gqa", "moe", "append", "gather", "compress", "score", "topk", "quantise",
                 "route", "combine", "merge", "q8_0"):  # fmt: skip
        yield Step(
            f"profiles.{name}", "ncu of its headline problem",
            ("-m", "lab.bringup.profile", name, f"{FOLDER}/profiles"), 240,
            why_not=NO_TIMES, needs="ncu",
        )  # fmt: skip


def _model() -> Iterator[Step]:
    for name in ("gqa", "kvcache", "dsv4", "merge", "moe"):
        yield Step(
            f"model.{name}", "modelled beside measured",
            ("scripts/cycles.py", "beside", f"{FOLDER}/speed.{name}.json", "--parameters",
             f"{FOLDER}/rates.parameters.json", "--limit", "20", "--perturbed", "2",
             "--plot", f"{FOLDER}/model.{name}.png", "--json", JSON),
            900, why_not=NO_TIMES,
        )  # fmt: skip


# Which steps of a bring-up run beside which, and on which GPU.
#
# With one GPU what only checks runs several at a time, and what measures has the machine for
# itself. With several GPUs what measures has the first one, and what checks runs beside it on the
# others.


ANY = ""  # the GPU that a process sees first


@dataclass
class Lane:
    """Steps in their order, `jobs` at a time, the GPUs in turn. free: a GPU for each step that may
    run now; who takes one puts it back."""

    steps: Sequence[Step]
    jobs: int
    gpus: Sequence[str]
    free: SimpleQueue[str] = field(default_factory=SimpleQueue, init=False)

    def __post_init__(self) -> None:
        for number in range(self.jobs):
            self.free.put(self.gpus[number % len(self.gpus)])


def rounds_of(steps: Sequence[Step], jobs: int, gpus: Sequence[str]) -> Iterator[list[Lane]]:
    """Lanes that run side by side, one such list behind the other: what the others rest on, checks
    and measurements, what needs no GPU."""
    first, *others = gpus or [ANY]
    begin = [step for step in steps if not (step.checks or step.measures)]
    checks = [step for step in steps if step.checks and not step.on_host]
    measured = [step for step in steps if step.measures]
    host = [step for step in steps if step.on_host]
    apart = Lane(checks, jobs, others or [first]), Lane(measured, 1, [first])
    yield [Lane(begin, 1, [first])]
    yield from [[*apart]] if others else ([lane] for lane in apart)
    yield [Lane(host, jobs, [first])]
