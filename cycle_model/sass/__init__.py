"""SASS of a kernel: instructions with their control words, control flow, loops."""
