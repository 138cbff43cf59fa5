"""SASS of a kernel as a control-flow graph, and its loops counted by kind."""
