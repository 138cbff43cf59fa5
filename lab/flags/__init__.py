"""Command-line flags, in groups that commands share."""
