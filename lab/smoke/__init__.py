"""The smoke test of a wheel: what it should hold, an empty environment, the pages' examples."""
