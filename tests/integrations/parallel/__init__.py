"""Tests of integrations.parallel."""
