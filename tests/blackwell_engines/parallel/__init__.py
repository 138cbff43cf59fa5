"""Tests of blackwell_engines.parallel."""
