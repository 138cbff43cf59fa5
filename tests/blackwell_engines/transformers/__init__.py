"""Tests of models of Hugging Face transformers."""
