"""Which interfaces there are, and which are taken."""

from __future__ import annotations

import pytest

from minddp.doctor.facts import Interface
from minddp.doctor.interfaces import choose_gloo_address, list_interfaces, outward, resolve

INTERFACES = {
    "lo": Interface(("127.0.0.1", "::1")),
    "eth0": Interface(("192.0.2.77",)),
    "eth1": Interface(("192.0.2.78",), is_up=False),
}


def test_the_loopback_is_there_and_leads_nowhere() -> None:
    interfaces = list_interfaces()
    assert any("127.0.0.1" in interface.addresses for interface in interfaces.values())
    assert not any(address.startswith("127.") for address in outward(interfaces).values())


def test_interfaces_that_others_may_reach() -> None:
    assert outward(INTERFACES) == {"eth0": "192.0.2.77"}


@pytest.mark.parametrize(
    ("wanted", "name_addresses", "address"),
    [
        ("eth0", (), "192.0.2.77"),
        ("eth0,eth1", (), "192.0.2.77"),
        ("eth7", ("127.0.0.1",), None),
        (None, ("127.0.0.1",), "127.0.0.1"),
        (None, ("192.0.2.77", "127.0.0.1"), "127.0.0.1"),  # the first cannot be bound here
        (None, (), "127.0.0.1"),
        ("", ("127.0.0.1",), "127.0.0.1"),
    ],
)
def test_where_gloo_will_listen(wanted: str | None, name_addresses: tuple[str, ...], address: str | None) -> None:
    assert choose_gloo_address(wanted, INTERFACES, name_addresses) == address


def test_names() -> None:
    assert "127.0.0.1" in resolve("localhost", 20.0)
    with pytest.raises(OSError):
        resolve("no-such-host.invalid", 20.0)
