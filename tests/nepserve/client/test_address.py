from __future__ import annotations

import pytest

from nepserve.client.address import parse_address


@pytest.mark.parametrize(
    ("url", "host", "port", "tls", "prefix", "authority", "base"),
    [
        ("http://localhost:8000", "localhost", 8000, False, "", "localhost:8000", "http://localhost:8000"),
        ("http://localhost:8000/", "localhost", 8000, False, "", "localhost:8000", "http://localhost:8000"),
        ("HTTP://Node7", "node7", 80, False, "", "node7", "http://node7"),
        ("https://lab.example", "lab.example", 443, True, "", "lab.example", "https://lab.example"),
        (
            "https://lab.example/nep/si/",
            "lab.example",
            443,
            True,
            "/nep/si",
            "lab.example",
            "https://lab.example/nep/si",
        ),
        ("https://lab.example:80", "lab.example", 80, True, "", "lab.example:80", "https://lab.example:80"),
        ("http://[::1]:8000", "::1", 8000, False, "", "[::1]:8000", "http://[::1]:8000"),
        (" http://127.0.0.1:1 ", "127.0.0.1", 1, False, "", "127.0.0.1:1", "http://127.0.0.1:1"),
        ("http://h/a%20b", "h", 80, False, "/a%20b", "h", "http://h/a%20b"),
    ],
)
def test_tcp(url, host, port, tls, prefix, authority, base):
    found = parse_address(url)
    assert (found.host, found.port, found.tls, found.prefix, found.socket) == (host, port, tls, prefix, None)
    assert (found.authority, found.base) == (authority, base)


def test_unix():
    found = parse_address("unix:///run/my%20nep.sock")
    assert (found.socket, found.authority, found.base) == ("/run/my nep.sock", "localhost", "http://localhost")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "not a server address"),
        ("localhost:8000", "not a server address"),
        ("127.0.0.1", "not a server address"),
        ("ftp://h", "not a server address"),
        ("http://", "not a server address"),
        ("unix://run/x.sock", "three slashes"),
        ("unix:", "three slashes"),
        ("http://h:99999", "port"),
        ("http://h:x", "port"),
        ("http://h/?a=1", "'\\?'"),
        ("http://h/#a", "'\\?'"),
        ("http://a..b", "name of a host"),
        (f"http://{'a' * 70}.de", "name of a host"),
    ],
)
def test_what_is_no_address_is_refused(url, reason):
    with pytest.raises(ValueError, match=reason):
        parse_address(url)


def test_a_password_is_refused_and_not_repeated():
    with pytest.raises(ValueError, match="api_key") as caught:
        parse_address("http://me:secret@h")
    assert "secret" not in str(caught.value)
