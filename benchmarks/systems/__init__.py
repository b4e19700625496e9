"""One worker program a system; :mod:`benchmarks.fleet` starts them."""
