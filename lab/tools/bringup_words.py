"""Words of a bring-up's document: its groups of steps, and verdicts of steps that did not run."""

from __future__ import annotations

GROUPS = {
    "doctor": "what is here, and what will run where",
    "instructions": "every form that kernels use, beside the emulator's bits",
    "assumptions": "what no kernel known to run there shows, each by a problem that needs it",
    "kernels": "kernels from small to large, beside their references",
    "random": "random problems, each twice, beside fp64",
    "sanitizer": "compute-sanitizer on small problems",
    "rates": "unit costs of the GPU, as parameters of the cycle model",
    "speed": "headline problems beside other libraries",
    "profiles": "one report of Nsight Compute per kernel",
    "model": "the cycle model with these parameters, beside what was measured",
}
SKIPPED, NOT_RUN = "skipped", "not run"
