"""Mutants of a kernel's PTX: one synchronisation removed, weakened, moved, or sent astray each."""
