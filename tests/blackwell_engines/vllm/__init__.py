"""Tests of the adaptor of vLLM, without vLLM."""
