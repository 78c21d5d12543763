import threading, time, sys, structlog
from concurrent.futures import ThreadPoolExecutor
import pytest
from app.ledger.database import Database
from tests.integration.test_limits import _gate, LIMIT, _rows
@pytest.mark.parametrize("n", range(25))
def test_it(postgres_url, n):
    inside, most, lock = 0, 0, threading.Lock()
    database = Database(postgres_url, pool_size=12)
    def one(_):
        nonlocal inside, most
        gate = _gate(database)
        for _ in range(6):
            with gate.hold(LIMIT, 3, timeout_s=30):
                with lock:
                    inside += 1; most = max(most, inside)
                time.sleep(0.005)
                with lock: inside -= 1
    with ThreadPoolExecutor(10) as t: list(t.map(one, range(10)))
    r = _rows(database)
    database.close()
    print("RES", most, r, flush=True)
    assert most==3 and r==0
