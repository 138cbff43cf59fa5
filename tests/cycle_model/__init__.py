"""Tests of the cycle model."""
