"""Tests of the adaptor of SGLang, without SGLang."""
