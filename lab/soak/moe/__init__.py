"""Random problems of the experts of Hopper, natively or in the emulator, against fp64."""
