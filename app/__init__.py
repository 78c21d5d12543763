"""MegaFlow."""
