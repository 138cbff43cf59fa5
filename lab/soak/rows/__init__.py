"""A row's result does not depend on other rows: random calls, one row of which is replaced."""
