"""Tests of the real engines on our adapters (`make engines`)."""
