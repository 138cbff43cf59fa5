"""Vocabulary that the kernel packages share: limits, plans, pipelines, compiling, launching."""
