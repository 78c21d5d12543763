"""Records model calls in the ledger."""
