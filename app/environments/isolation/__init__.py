"""Isolation of environments: users, system calls, and the check that a reset left nothing behind."""
