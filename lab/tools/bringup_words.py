"""Words of a bring-up's document: its groups of steps, and verdicts of steps that did not run."""

from __future__ import annotations

GROUPS = {
    "doctor": "hardware and software, and what will run where",
    "instructions": "every form that kernels use, compared with the emulator's bits",
    "assumptions": "assumptions that no known kernel confirms, each with a problem that needs it",
    "kernels": "kernels from small to large, compared with their references",
    "random": "random problems, each twice, compared with fp64",
    "sanitizer": "compute-sanitizer on small problems",
    "rates": "unit costs of the GPU, as parameters of the cycle model",
    "speed": "headline problems, compared with other libraries",
    "profiles": "one report of Nsight Compute per kernel",
    "model": "the cycle model with these parameters, compared with measurements",
}
SKIPPED, NOT_RUN = "skipped", "not run"
