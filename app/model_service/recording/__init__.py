"""Recording: calls and accounts of them, kept in the ledger."""
