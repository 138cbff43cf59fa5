"""Wrong calls, generated and judged."""
