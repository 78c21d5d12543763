"""The ledger: every read and write of PostgreSQL.

Each write is one transaction, moves a state by a conditional update that carries the attempt's number, and appends the
event that says so. No other package touches the tables.
"""
