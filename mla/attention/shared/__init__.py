"""Device code that the kernels with clusters share: the exchange of O, and the end of a row."""
