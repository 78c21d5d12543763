"""Reads compose files into frozen models and refuses forbidden keys, all in one error. Needs no container engine."""
