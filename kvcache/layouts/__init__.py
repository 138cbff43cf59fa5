"""Cache layouts of models: records, streams, rings, tails; presets and config files."""
