"""Problems with inputs meant to go wrong, for tests and for mutants of a kernel."""
