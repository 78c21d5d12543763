"""What of the kernel's tables counts as a difference between two looks at an environment."""

from __future__ import annotations

from app.environments.isolation.fingerprint import Fingerprint, _parsed, differences

_TABLE = """
==> /proc/net/tcp <==
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
"""


def looked_at(*listening: str) -> Fingerprint:
    """The table of sockets with these listening."""
    rows = [f"   {n}: {address} 00000000:0000 0A 00000000:00000000" for n, address in enumerate(listening)]
    return Fingerprint(_parsed(_TABLE + "\n".join(rows) + "\n"))


def test_the_engines_resolver_may_listen_at_another_port_after_a_start() -> None:
    assert differences(looked_at("0B00007F:A58B"), looked_at("0B00007F:B5FB")) == ()


def test_one_more_beside_the_resolver_is_a_difference() -> None:
    (found,) = differences(looked_at("0B00007F:A58B"), looked_at("0B00007F:B5FB", "0B00007F:1F90"))
    assert found == "sockets: tcp 0B00007F:any port came"


def test_elsewhere_the_port_counts() -> None:
    found = differences(looked_at("0100007F:A58B"), looked_at("0100007F:B5FB"))
    assert found == ("sockets: tcp 0100007F:B5FB came", "sockets: tcp 0100007F:A58B went")
