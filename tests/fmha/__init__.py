"""Tests of the attention kernel."""
