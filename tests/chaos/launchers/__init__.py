"""Starts the product's own programs with faults wrapped around some of its functions: see `faults`."""
