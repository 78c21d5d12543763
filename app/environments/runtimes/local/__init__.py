"""Environments without isolation: a folder of this host and marked processes, for machines without an engine."""
