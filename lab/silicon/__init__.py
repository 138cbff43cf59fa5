"""Measurements of GPUs: conformance of instructions, and their times."""
