"""Adapters to other libraries that benchmarks compare our kernels with, a module for each.

Each module has

- `DISTRIBUTIONS`: the distributions whose versions a file of figures records;
- `available()`: why the library cannot run here, "" if it can;
- `prepare(...)`: lays the inputs out for the library, once and untimed. It returns a `Run`, or an
  object with `launch(part, tokens)` that returns one.

A module imports its library inside these functions only, so that every module can be imported, and
its layouts tested, without the library and without a GPU.
"""
