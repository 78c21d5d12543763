"""Which hosts a task may reach: names in all their spellings, and addresses that are not meant."""

from __future__ import annotations

import ipaddress
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.environments.networks.addresses import admissible, is_public
from app.errors import SpecInvalid
from app.models.hosts import AllowedHosts, HostInvalid, address_of, canonical

_letters = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=12)
_labels = st.builds(lambda word: f"n{word}", _letters)  # none is a number
_names = st.lists(_labels, min_size=1, max_size=5).map(".".join)
_ports = st.integers(min_value=1, max_value=65535)


def _shouted(name: str, upper: list[bool]) -> str:
    return "".join(letter.upper() if up else letter for letter, up in zip(name, upper, strict=False))


@given(_names, st.lists(st.booleans(), min_size=80, max_size=80), st.booleans())
def test_spellings_of_one_name_are_one(name: str, upper: list[bool], dot: bool) -> None:
    spelt = _shouted(name, upper) + ("." if dot else "")
    assert canonical(spelt) == name
    assert AllowedHosts([spelt]).allows(name, 443)


@given(_names, _names)
def test_a_plain_name_allows_itself_alone(rule: str, asked: str) -> None:
    allowed = AllowedHosts([rule])
    assert allowed.allows(asked, 443) == (asked == rule)
    assert not allowed.allows(f"{asked}.{rule}", 443)
    assert not allowed.allows(f"{asked}{rule}", 443)


@given(_names, _names)
def test_a_star_allows_what_is_below_and_nothing_beside(rule: str, below: str) -> None:
    allowed = AllowedHosts([f"*.{rule}"])
    assert allowed.allows(f"{below}.{rule}", 80)
    assert not allowed.allows(rule, 80)
    assert not allowed.allows(f"{below}{rule}", 80)
    assert not allowed.allows(f"{rule}.{below}x", 80)


@given(_names, _ports, _ports)
def test_a_port_is_that_port_alone_and_none_means_those_of_http(name: str, port: int, asked: int) -> None:
    assert AllowedHosts([f"{name}:{port}"]).allows(name, asked) == (asked == port)
    assert AllowedHosts([name]).allows(name, asked) == (asked in (80, 443))


@given(st.text(max_size=30))
def test_any_text_is_a_host_in_one_spelling_or_none(text: str) -> None:
    try:
        found = canonical(text)
    except HostInvalid:
        return
    address = address_of(found)
    again = f"[{found}]" if address is not None and address.version == 6 else found
    assert canonical(again) == found
    assert found.isascii()
    assert not set(found) & set(" /\\@#?%[]\t\r\n\0")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            ".",
            "a..b",
            "a b",
            "-a.org",
            "a-.org",
            "user@index.test",
            "index.test/x",
            "index.test\\x",
            "index.test\n",
        ),
        *(
            "127.1",
            "0x7f000001",
            "2130706433",
            "0177.0.0.1",
            "127.0.0.1.1",
            "256.1.1.1",
            "a.0x7f",
            "1.2.3.4.",
            "a" * 64,
        ),
        *("[::1", "[fe80::1%eth0]", "[127.0.0.1]", "::1", "*", "*.org", "xn--\u00e9", "a.b\u3002\u3002c", "\ud800"),
    ],
)
def test_what_resolvers_may_read_differently_is_no_host(text: str) -> None:
    if text == "1.2.3.4.":  # the dot at the end is nothing
        assert canonical(text) == "1.2.3.4"
        return
    with pytest.raises(HostInvalid):
        canonical(text)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("B\u00fccher.example", "xn--bcher-kva.example"),
        ("b\u00fccher\u3002example", "xn--bcher-kva.example"),
        ("XN--BCHER-KVA.example.", "xn--bcher-kva.example"),
        ("index\uff0etest", "index.test"),
        ("my_registry.internal", "my_registry.internal"),
        ("[::FFFF:10.0.0.1]", "10.0.0.1"),
        ("[2001:DB8:0:0::1]", "2001:db8::1"),
    ],
)
def test_names_and_addresses_have_one_spelling(text: str, host: str) -> None:
    assert canonical(text) == host


@pytest.mark.parametrize(
    "pattern",
    [
        *("*", "", "*.", "*.*.org", "a.*.org", "https://index.test", "index.test:0", "index.test:65536", "index.test:"),
        *("u@index.test", "*.10.0.0.1", "10.0.0.0/8", "index.test/simple", "::1", "index.test:443:443"),
        "index.test:\u0664\u0664\u0663",
    ],
)
def test_a_pattern_that_is_none_is_refused_with_what_was_expected(pattern: str) -> None:
    with pytest.raises(SpecInvalid, match=r"allowed_hosts: expected"):
        AllowedHosts([pattern])


def test_ipv4_in_the_clothes_of_ipv6_is_what_it_is() -> None:
    assert AllowedHosts(["10.0.0.1:80"]).allows(canonical("[::ffff:10.0.0.1]"), 80)
    assert not AllowedHosts(["index.test"]).allows(canonical("[::ffff:10.0.0.1]"), 80)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *((text, True) for text in ("93.184.216.34", "1.1.1.1", "2606:4700::1111", "203.0.113.80", "198.18.0.7")),
        *((text, False) for text in ("0.0.0.0", "127.0.0.1", "127.8.8.8", "10.1.2.3", "172.16.0.1", "192.168.1.1")),
        *((text, False) for text in ("169.254.169.254", "100.64.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255")),
        *((text, False) for text in ("::", "::1", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1", "fec0::1")),
        *((text, False) for text in ("::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:a::f5ff:fffe")),
        *((text, True) for text in ("::ffff:1.1.1.1", "64:ff9b::101:101")),
    ],
)
def test_only_public_addresses_are(address: str, public: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is public


@given(st.ip_addresses())
def test_an_address_inwards_is_admissible_only_when_it_is_meant(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    by_name = AllowedHosts(["index.test"])
    assert admissible(address, "index.test", 443, by_name) == is_public(address)
    meant = AllowedHosts(["index.test", f"[{address}]" if address.version == 6 else str(address)])
    mapped = address.version == 6 and address.ipv4_mapped is not None
    assert mapped or admissible(address, "index.test", 443, meant)


def test_localhost_by_name_means_this_hosts_loopback_and_no_other_private_address() -> None:
    allowed = AllowedHosts(["localhost:8000"])
    assert admissible(ipaddress.ip_address("127.0.0.1"), "localhost", 8000, allowed)
    assert admissible(ipaddress.ip_address("::1"), "localhost", 8000, allowed)
    assert not admissible(ipaddress.ip_address("10.0.0.1"), "localhost", 8000, allowed)
    assert not admissible(ipaddress.ip_address("127.0.0.1"), "localhost.index.test", 8000, allowed)
