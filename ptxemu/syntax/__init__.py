"""PTX text -> tree -> control-flow graph. Knows the grammar, not the meaning of any instruction."""
