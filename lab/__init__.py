"""What the commands of scripts/ share, and tests use as well: cases, runs, benchmarks, tools."""
