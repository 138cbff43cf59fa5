"""Mutants of a kernel's PTX: each has one synchronisation removed, weakened, moved, or
misdirected.
"""
