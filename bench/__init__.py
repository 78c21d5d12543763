"""Benchmarks: each runs real tasks on a stack of its own beside its peers, and writes `results/<name>.json` and a plot."""
