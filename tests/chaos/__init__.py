"""The chaos suite: real processes, a PostgreSQL and a Redis of its own, one kind of fault per case, and a judge.

    python -m tests.chaos                      every case
    python -m tests.chaos --case redis-kill    one of them
    python -m tests.chaos --list

Nothing in the product knows of it: faults come from outside (signals, restarts, a relay that goes silent), or from
launchers that wrap the product's functions before they start its own main.
"""
