"""Code shared by the commands of scripts/ and by tests: cases, runs, benchmarks, tools."""
