"""The commands of `python -m ptxemu`: each module has `main(words, program)`, which returns the
exit code."""
