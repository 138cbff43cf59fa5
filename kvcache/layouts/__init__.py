"""What a cache holds of a model: records, streams, rings, tails; presets and config files."""
