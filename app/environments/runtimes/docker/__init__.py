"""Environments in containers of a Docker engine, whose client is loaded at first use."""
