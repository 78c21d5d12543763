"""Finds datasets by name or path, reads them lazily, and chooses among their tasks."""
