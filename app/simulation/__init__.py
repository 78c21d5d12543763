"""Simulates thousands of instances in one process, on the real queues, ledger and leases."""
