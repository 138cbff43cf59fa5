"""Tests of mla."""
