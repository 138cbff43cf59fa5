"""What GPUs themselves say: conformance of instructions, and their times."""
