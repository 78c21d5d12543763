"""Benchmarks: real tasks on a stack of its own, beside peers; each writes `results/<name>.json` and a plot."""
