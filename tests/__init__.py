"""Tests: `make test` runs the quick ones, `make matrix` the matrices, `--hw` adds a real GPU."""
