"""Engines that answer model calls, and the check that one does. `replay` plays scripted conversations."""
