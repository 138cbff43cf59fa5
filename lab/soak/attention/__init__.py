"""Random attention problems, natively or in the emulator, against fp64."""
