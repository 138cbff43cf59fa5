"""The house rules: a module per family of them, as functions from a file to findings."""
