"""Mutants: PTX with one synchronising instruction removed, weakened, changed or moved."""
