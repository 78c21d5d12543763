"""An installation on several hosts: servers and control plane on the first, pools on those that join."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
from docker.errors import DockerException

from app.client import MegaFlow
from app.errors import MegaFlowError
from app.host.engine import engine_of
from app.ledger import schema
from app.models.provider_keys import without_keys
from app.settings import PREFIX, Settings
from tests.cluster.network import Machine, Network, run
from tests.integration.docker_fixture import remove_images
from tests.services import missing, serving, short_folder

POSTGRES = Path("/usr/lib/postgresql/15/bin")
PORTS = {"postgres": 5432, "redis": 6390, "s3": 5055, "gateway": 8766, "web": 8768}
_ROOT = Path(__file__).resolve().parents[2]
_ACL = (
    "user megaflow on >{password} ~* &* -@all +@read +@write +@connection +@transaction +@pubsub -@dangerous +info"
    " +time +eval +evalsha +script|load +script|exists +acl|setuser +acl|deluser +acl|users"
)
"""As docker-compose.yml has it, with the right to make users for hosts."""


def refuse_unready() -> None:
    """Skip, or fail in CI, where hosts cannot be made."""
    if os.geteuid() != 0:
        missing("namespaces need root")
    for program in ("ip", "nsenter", "unshare", "openssl", "redis-server", str(POSTGRES / "initdb")):
        if shutil.which(program) is None:
            missing(f"{program}: apt-get install iproute2 redis-server postgresql-15")


@contextmanager
def images_of(settings: Settings) -> Iterator[None]:
    """An engine that builds images for the hosts, without this installation's images afterwards."""
    engine = engine_of(settings)
    try:
        engine.api.inspect_image(settings.base_image)
    except (DockerException, MegaFlowError) as error:
        missing(f"a base image: {error}")
    try:
        yield
    finally:
        remove_images(engine, settings)


def wait_until(true: Callable[[], Any], what: str, timeout_s: float = 60.0) -> float:
    """Seconds that it took. Raises: AssertionError."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < timeout_s, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(0.05)
    return time.monotonic() - began


class Host:
    """A machine with a home of its own that may join."""

    def __init__(self, machine: Machine, home: Path) -> None:
        self.machine, self.home = machine, home
        self.name = machine.name

    def megaflow(self, *arguments: str, timeout_s: float = 180, **more: str) -> subprocess.CompletedProcess[str]:
        """A command on this host, which knows nothing but its home."""
        environ = _plain(os.environ) | {f"{PREFIX}HOME": str(self.home)} | more
        command = self.machine.command(sys.executable, "-m", "megaflow", *arguments)
        return subprocess.run(
            command, env=environ, cwd=_ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def join(self, head: Head, *options: str, url: str = "") -> str:
        """Invite it, and have it join; what it said. Raises: AssertionError."""
        invited = json.loads(head.megaflow("worker", "invite", "--json").stdout)
        words = (
            "worker",
            "join",
            url or invited["url"],
            "--token",
            invited["token"],
            "--plain-http",
            "--no-install",
            *options,
        )
        done = self.megaflow(*words)
        assert done.returncode == 0, done.stderr + self.logs()
        return done.stdout

    def forget(self) -> None:
        """Its files are gone, as those of a machine that is thrown away."""
        shutil.rmtree(self.home)

    def logs(self) -> str:
        """The ends of its logs, for a test that failed."""
        return "".join(f"\n== {log}\n{log.read_text()[-3000:]}" for log in sorted((self.home / "logs").glob("*.log")))


class Head:
    """The first host: PostgreSQL and Redis over TLS with passwords, an S3 server, control worker, gateway, web."""

    def __init__(self, network: Network, folder: Path, stack: ExitStack, **settings: Any) -> None:
        self.machine, self._folder, self._stack = network.host("head"), folder, stack
        self.relay = network.host("relay")
        self.home = folder / "head"
        self.home.mkdir(mode=0o711)
        self._certify()
        self._postgres()
        self._redis()
        at = self.machine.address
        query = f"sslmode=verify-full&sslrootcert={folder}/ca.pem"
        broker = f"ssl_cert_reqs=required&ssl_ca_certs={folder}/ca.pem"
        (self.home / "join.env").write_text("AWS_ACCESS_KEY_ID=for-hosts\nAWS_SECRET_ACCESS_KEY=for-hosts-alone\n")
        self._store()
        self.settings = Settings(
            home=self.home,
            installation="spread",
            database_url=f"postgresql://megaflow:db-word@{at}:{PORTS['postgres']}/megaflow?{query}",
            broker_url=f"rediss://megaflow:broker-word@{at}:{PORTS['redis']}/0?{broker}",
            artifacts_url="s3://evidence/runs",
            s3_endpoint_url=f"http://{at}:{PORTS['s3']}",
            gateway_url=(f"http://{at}:{PORTS['gateway']}",),
            web_url=f"http://{at}:{PORTS['web']}",
            bind=at,
            replay_port=8765,
            persistent_instances=0,
            ephemeral_capacity=2,
            host_cpu_most=0.0,  # all hosts are this one, which may be busy
            join_settings=self.home / "join.env",
            **settings,
        )
        schema.migrate(self.settings.database())
        for name, module in {
            "launcher": "app.workers.launcher", "control": "app.control.worker", "web": "app.web",
            "gateway": "app.model_service.gateway",
        }.items():  # fmt: skip
            address = ["--host", at, "--port", str(PORTS[name])] if name in PORTS else []
            self._start(name, sys.executable, "-m", module, *address)

    @property
    def certificates(self) -> Path:
        """Of the authority of both servers."""
        return self._folder / "ca.pem"

    @property
    def environ(self) -> dict[str, str]:
        return _plain(os.environ) | self.settings.variables() | _KEYS

    def megaflow(self, *arguments: str, timeout_s: float = 180) -> subprocess.CompletedProcess[str]:
        """A command on this host. Raises: AssertionError."""
        command = self.machine.command(sys.executable, "-m", "megaflow", *arguments)
        done = subprocess.run(
            command, env=self.environ, cwd=_ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, done.stderr
        return done

    def slow_links(self, delay_s: float) -> str:
        """Have hosts that join from here on reach every server late, each way; the web server's URL for them."""
        at, far = self.machine.address, self.relay.address
        program = str(Path(__file__).with_name("relay.py"))
        for port in PORTS.values():
            words = (sys.executable, program, f"{far}:{port}", f"{at}:{port}", f"{delay_s}")
            self._start(f"relay-{port}", *words, machine=self.relay)
            log = self._folder / f"relay-{port}.log"
            wait_until(lambda log=log: "ready" in log.read_text(), "the relay listens")
        names = ("MEGAFLOW_DATABASE_URL", "MEGAFLOW_BROKER_URL", "MEGAFLOW_S3_ENDPOINT_URL", "MEGAFLOW_GATEWAY_URL")
        ours = self.settings.variables()
        lines = [f"{name}={ours[name].replace(at, far)}\n" for name in names]
        (self.home / "join.env").write_text((self.home / "join.env").read_text() + "".join(lines))
        return self.settings.web_base().replace(at, far)

    def start_redis(self) -> None:
        """Start Redis, again after `stop_redis`: it has its data, and none of the users that were made since."""
        command = tuple(self.machine.command("redis-server", str(self._folder / "redis.conf")))
        self._redis_run = ExitStack()
        self._redis_run.enter_context(
            serving(command, logfile=self._folder / "redis.log", user=None, stop=signal.SIGTERM)
        )
        self._stack.push(self._redis_run)
        words = ["redis-cli", "--tls", "--cacert", f"{self._folder}/ca.pem", "-h", self.machine.address, "-p", "6390"]
        wait_until(lambda: "NOAUTH" in _said(*self.machine.command(*words, "get", "x")), "redis answers")

    def stop_redis(self) -> None:
        self._redis_run.close()

    def _start(
        self, name: str, *words: str, environ: Mapping[str, str] | None = None, machine: Machine | None = None
    ) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                (machine or self.machine).command(*words),
                env=environ or self.environ,
                cwd=_ROOT,
                stdout=log,
                stderr=log,
            )
        self._stack.callback(process.wait, 30)
        self._stack.callback(process.terminate)

    def _certify(self) -> None:
        at, folder = self.machine.address, self._folder
        names = ["-subj", "/CN=mf", "-addext", f"subjectAltName=IP:{at},IP:{self.relay.address}", "-days", "2"]
        new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *names]
        run(*new, "-keyout", f"{folder}/key.pem", "-out", f"{folder}/ca.pem")
        for owner in ("postgres", "redis"):
            copy = folder / f"{owner}-key.pem"
            shutil.copy(folder / "key.pem", copy)
            copy.chmod(0o600)
        shutil.chown(folder / "postgres-key.pem", "postgres", "postgres")

    def _postgres(self) -> None:
        data = self._folder / "postgres"
        data.mkdir(mode=0o700)
        shutil.chown(data, "postgres", "postgres")
        subprocess.run([POSTGRES / "initdb", "-D", data, "-U", "postgres", "--auth=trust", "-E", "UTF8"],
                       check=True, capture_output=True, user="postgres", group="postgres", cwd="/")  # fmt: skip
        (data / "pg_hba.conf").write_text("local all all trust\nhostssl all all 0.0.0.0/0 scram-sha-256\n")
        options = {
            "listen_addresses": self.machine.address, "port": PORTS["postgres"], "unix_socket_directories": data,
            "ssl": "on", "ssl_cert_file": self._folder / "ca.pem", "ssl_key_file": self._folder / "postgres-key.pem",
            "fsync": "off", "max_connections": 200,
        }  # fmt: skip
        words = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        command = self.machine.command("setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups",
                                       str(POSTGRES / "postgres"), "-D", str(data), *words)  # fmt: skip
        log = self._folder / "postgres.log"
        self._stack.enter_context(serving(tuple(command), logfile=log, user=None, stop=signal.SIGINT))
        url = f"postgresql://postgres@/postgres?host={data}"
        wait_until(lambda: _connects(url), "postgres answers")
        with psycopg.connect(url, autocommit=True) as connection:
            # No superuser: what the control plane needs is to own its database, and to make roles for hosts.
            connection.execute("CREATE ROLE megaflow LOGIN CREATEROLE PASSWORD 'db-word'")
            connection.execute("CREATE DATABASE megaflow OWNER megaflow")

    def _redis(self) -> None:
        at, folder = self.machine.address, self._folder
        (folder / "redis").mkdir()
        (folder / "redis.conf").write_text(
            f"port 0\ntls-port {PORTS['redis']}\nbind {at}\ntls-cert-file {folder}/ca.pem\n"
            f"tls-key-file {folder}/redis-key.pem\ntls-ca-cert-file {folder}/ca.pem\ntls-auth-clients no\n"
            f'dir {folder}/redis\nappendonly yes\nsave ""\nmaxmemory-policy noeviction\n'
            f"user default off\n{_ACL.format(password='broker-word')}\n"
        )
        self.start_redis()

    def _store(self) -> None:
        at = self.machine.address
        self._start("s3", sys.executable, "-m", "moto.server", "-H", at, "-p", str(PORTS["s3"]), environ=os.environ)

        import boto3
        from botocore.exceptions import BotoCoreError

        def made() -> bool:
            try:
                client = boto3.client("s3", endpoint_url=f"http://{at}:{PORTS['s3']}", region_name="us-east-1",
                                      aws_access_key_id="x", aws_secret_access_key="x")  # fmt: skip
                client.create_bucket(Bucket="evidence")
            except BotoCoreError:
                return False
            return True

        wait_until(made, "the store answers")


_KEYS = {"AWS_ACCESS_KEY_ID": "of-the-head", "AWS_SECRET_ACCESS_KEY": "of-the-head", "AWS_DEFAULT_REGION": "us-east-1"}


def _plain(environ: Mapping[str, str]) -> dict[str, str]:
    """Without any setting or credential of the tests' own process."""
    kept = {name: value for name, value in without_keys(environ).items() if not name.startswith((PREFIX, "AWS_"))}
    return kept | {"PYTHONUNBUFFERED": "1"}


def _connects(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


def _said(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


class Cluster:
    """A head, and hosts that may join it."""

    def __init__(self, network: Network, head: Head, hosts: list[Host], flow: MegaFlow) -> None:
        self.network, self.head, self.hosts, self.flow = network, head, hosts, flow

    def slots(self) -> dict[str, int]:
        """By host: attempts that its ready pools take at once."""
        with self.flow.database.begin() as connection:
            rows = connection.exec_driver_sql(
                "SELECT host, sum(slots)::int FROM instances WHERE mode = 'persistent' AND state = 'ready'"
                " AND host IS NOT NULL GROUP BY host"
            )
            return {row[0]: row[1] for row in rows}


@contextmanager
def cluster(count: int, **settings: Any) -> Iterator[Cluster]:
    """A head with `count` hosts that have not joined yet."""
    refuse_unready()
    with short_folder() as folder, ExitStack() as stack:
        network = Network()
        stack.callback(network.close)
        hosts = []
        head = Head(network, folder, stack, **settings)
        for number in range(count):
            home = folder / f"h{number}"
            machine = network.host(f"host{number}", hidden=(head.home, folder / "redis", folder / "postgres"))
            hosts.append(Host(machine, home))
        os.environ.update(_KEYS)
        with MegaFlow(head.settings) as flow:
            try:
                yield Cluster(network, head, hosts, flow)
            except BaseException:
                for log in ("control", "web"):
                    print(f"== {log}\n{(folder / f'{log}.log').read_text()[-3000:]}")
                for host in hosts:
                    print(host.logs())
                raise
