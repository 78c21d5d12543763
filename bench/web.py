"""How fast the web server answers over a run of 50,000 tasks, and what a hundred viewers cost.

python -m bench.web     (writes results/web.json)

The run is written into a PostgreSQL of its own, ended but for one task. Pages are asked for by a process beside the
server, the median of twenty; a viewer is a stream of server-sent events. What a browser adds to the first byte is
measured where Chromium is installed.
"""

from __future__ import annotations

import http.client
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from uuid import UUID

import psutil
from sqlalchemy import text

from app.ledger import accept, tasks, users
from app.ledger.accept import NewRun
from app.ledger.database import Database, sql
from app.ledger.users import Scope, TokenKind
from app.models.spec import AgentTask, Bundle, EnvironmentSpec, ScriptGoal, TaskSpec
from app.settings import Settings
from app.stack.home import process_environment
from app.stack.private import private_stack
from bench import control_record
from bench.control_record import Part
from bench.record import RESULTS, Row, row
from bench.system import free_port

TASKS, VIEWERS, ROUNDS, INLINE = 50_000, 100, 20, 10_000
WATCHED_S = 30.0


def filled(database: Database) -> tuple[UUID, UUID]:
    """The run, and its one task that waits."""
    specs = [TaskSpec(task=a_task(f"task-{number}"), agent="nop") for number in range(TASKS)]
    made = accept.accept(database, NewRun(specs=specs, name="large"))
    with database.begin() as connection:
        sql(connection, "SET LOCAL session_replication_role = replica")  # the triggers hold what a worker may do
        connection.execute(_END, {"run": made.run_id, "not": made.task_ids[-1]})
        connection.execute(_ATTEMPTS, {"run": made.run_id, "not": made.task_ids[-1]})
    with closing(database.raw()) as connection:
        connection.execute("VACUUM ANALYZE")
    return made.run_id, made.task_ids[-1]


_END = text("""
UPDATE tasks SET state = 'succeeded', end_reason = 'submitted', attempts = 1, finished_at = clock_timestamp(),
    verdict = jsonb_build_object('reward', (hashtext(id::text) % 2 = 0)::int, 'counts', true, 'detail', 'as it is')
WHERE run_id = :run AND id <> :not""")
_ATTEMPTS = text("""
INSERT INTO attempts (id, task_id, number, state, user_name, mode, resource_class, finished_at, cost_usd, verdict)
SELECT gen_random_uuid(), id, 1, 'finished', user_name, 'persistent', resource_class, finished_at, 0.01, verdict
FROM tasks WHERE run_id = :run AND id <> :not""")


def a_task(name: str) -> AgentTask:
    goal = ScriptGoal(tests=Bundle(sha256="0" * 64, size_bytes=0))
    return AgentTask(name=name, description="words " * 100, environment=EnvironmentSpec(image="example"), goal=goal)


_COUNTING = """
import sys
from itertools import count
from pathlib import Path

from sqlalchemy import event
from sqlalchemy.engine import Engine

from app.web.__main__ import main

file, numbers = Path(sys.argv.pop(1)), count(1)
event.listen(Engine, "begin", lambda _: file.write_text(str(next(numbers))))
sys.exit(main())
"""
"""The server's program, which counts its transactions into a file."""


class Site:
    """The server as a process, and who asks it."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self.port = free_port()
        secret, _ = users.add_token(database, users.OWNER, Scope.ADMINISTER)
        self.headers = {"Authorization": f"Bearer {secret}"}
        self.counted = settings.home / "transactions"
        command = [sys.executable, "-c", _COUNTING, str(self.counted), "--port", str(self.port)]
        self.process = subprocess.Popen(command, env=process_environment(settings))  # noqa: S603
        while not self._answers():
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            return self.ask("/sign-in")[0] > 0
        except OSError:
            return False

    def ask(self, path: str, body: bytes | None = None) -> tuple[float, float, bytes]:
        """Seconds to the first byte and to the last, and the bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        begun = time.perf_counter()
        connection.request("POST" if body else "GET", path, body, self.headers)
        reply = connection.getresponse()
        first = time.perf_counter() - begun
        content = reply.read()
        if reply.status != 200:
            raise OSError(f"{path}: {reply.status}: {content[:300]!r}")
        return first, time.perf_counter() - begun, content

    def watch(self, path: str, heard: Callable[[bytes], None], stop: threading.Event) -> None:
        """A viewer: hands every line on until `stop`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path, headers=self.headers)
        reply = connection.getresponse()
        while not stop.is_set():
            heard(reply.readline())

    def transactions(self) -> int:
        return int(self.counted.read_text())

    def cpu_s(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system


@contextmanager
def site() -> Iterator[tuple[Site, Database]]:
    # A control worker would ask for instances, whose events viewers are told of.
    with private_stack(control_workers=0) as stack, closing(Database(stack.settings.database())) as database:
        served = Site(stack.settings, database)
        try:
            yield served, database
        finally:
            served.process.terminate()
            served.process.wait(20)


def pages(served: Site, run_id: UUID) -> Iterator[Row]:
    """First bytes of the run's page, of the fleet and of a list of tasks."""
    for name, path in (
        ("run page", f"/runs/{run_id}"),
        ("run page, another filter each time", f"/runs/{run_id}?name={{}}"),
        ("fleet", "/"),
        ("tasks by the API", f"/api/v1/runs/{run_id}/tasks?limit=200"),
    ):
        found = [served.ask(path.format(number))[0] for number in range(ROUNDS)]
        yield row(f"{name}, first byte", 1000 * statistics.median(found), "ms", goal=150.0, better="less")
        yield row(f"{name}, first byte of the first", 1000 * found[0], "ms")


def viewers(served: Site, database: Database, run_id: UUID, waiting: UUID) -> Iterator[Row]:
    """A hundred streams of the run: their cost while nothing and while something happens, and when they see one."""
    stop, seen, ready = threading.Event(), [], threading.Semaphore(0)

    def heard(line: bytes) -> None:
        if b"cancelled" in line and b"legend" in line:
            seen.append(time.perf_counter())
        elif b"legend" in line:
            ready.release()

    for _ in range(VIEWERS):
        threading.Thread(target=served.watch, args=(f"/live/runs/{run_id}", heard, stop), daemon=True).start()
    for _ in range(VIEWERS):
        ready.acquire(timeout=60)
    time.sleep(3)  # what the viewers' coming asked for is over
    for name, busy in (("quiet", False), ("with an event each half second", True)):
        before, made, begun = served.cpu_s(), served.transactions(), time.perf_counter()
        while time.perf_counter() - begun < WATCHED_S:
            time.sleep(0.5)
            if busy:
                with database.begin() as connection:
                    sql(connection, "INSERT INTO events (kind, run_id) VALUES ('bench.beat', :run)", {"run": run_id})
        took = time.perf_counter() - begun
        share = 100 * (served.cpu_s() - before) / took
        yield row(f"{VIEWERS} viewers, {name}", share, "% of a core", goal=5.0, better="less")
        rate = (served.transactions() - made) / took
        yield row(f"the server's transactions, {name}", rate, "1/s", goal=1.05, better="less")  # a look each second
    begun = time.perf_counter()
    tasks.cancel(database, [waiting])
    committed = time.perf_counter()
    while len(seen) < VIEWERS and time.perf_counter() - begun < 30:
        time.sleep(0.05)
    yield row("live update, the last viewer", max(seen) - committed, "s", goal=1.0, better="less")
    stop.set()


def inline(served: Site) -> Iterator[Row]:
    """Ten thousand tasks in one request."""
    took = []
    for number in range(3):
        given = [a_task(f"inline-{number}-{index}").model_dump(mode="json") for index in range(INLINE)]
        body = json.dumps({"tasks": given, "agent": "nop", "name": f"inline-{number}"}).encode()
        took.append(served.ask("/api/v1/runs", body)[1])
    yield row("10,000 tasks accepted in one request", statistics.median(took), "s", goal=1.0, better="less")


def painted(served: Site, database: Database, run_id: UUID) -> Iterator[Row]:
    """When a browser has painted the run's page, and how much script it took."""
    program = shutil.which("chromium")
    if program is None:
        print("first paint: not measured: chromium is not installed")
        return
    from playwright.sync_api import sync_playwright

    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
    with (
        sync_playwright() as playwright,
        closing(playwright.chromium.launch(executable_path=program, args=quiet)) as found,
    ):
        page = found.new_page()
        secret, _ = users.add_token(database, users.OWNER, Scope.ADMINISTER, kind=TokenKind.LINK)
        paints, sizes = [], []
        page.on("requestfinished", lambda one: sizes.append((one.url, one.sizes()["responseBodySize"])))
        page.goto(f"http://127.0.0.1:{served.port}/sign-in?once={secret}&next=/models")
        page.wait_for_timeout(500)
        for _ in range(5):
            page.goto(f"http://127.0.0.1:{served.port}/runs/{run_id}")
            page.wait_for_timeout(300)
            asked = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
            paints.append(float(page.evaluate(asked)))
    script = sum(size for url, size in sizes if url.endswith(".js") and size > 0)
    yield row("run page, first paint", statistics.median(paints), "ms", goal=1000.0, better="less")
    yield row("script of a page, compressed", script / 1000, "kB", goal=60.0, better="less")


def main() -> int:
    """Measure, print, write."""
    busy, begun = psutil.cpu_percent(interval=1.0) / 100, time.monotonic()
    with site() as (served, database):
        run_id, waiting = filled(database)
        rows = [
            *pages(served, run_id),
            *painted(served, database, run_id),
            *viewers(served, database, run_id, waiting),
            *inline(served),
        ]
    for one in rows:
        held = "" if one.goal is None else f"goal {one.goal:g}: {'yes' if one.holds else 'NO'}"
        print(f"{one.metric:45} {one.value:8.4g} {one.unit:12} {held}")
    path = RESULTS / "web.json"
    control_record.keep(path, "web", Part(rows, {}), busy=busy, took_s=time.monotonic() - begun)
    print(f"written: {path}; others kept {busy:.0%} of the processors busy before")
    return 0


if __name__ == "__main__":
    sys.exit(main())
