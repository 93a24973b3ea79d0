"""One environment variable switches all accelerations off."""

from __future__ import annotations

import pytest

from minddp.platform.acceleration_switch import VARIABLE, acceleration_is_on


@pytest.mark.parametrize(("value", "is_on"), [(None, True), ("on", True), ("off", False)])
def test_acceleration_is_on_unless_switched_off(
    monkeypatch: pytest.MonkeyPatch, value: str | None, is_on: bool
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    assert acceleration_is_on() is is_on


@pytest.mark.parametrize("value", ["", "OFF", "0", "false"])
def test_other_values_are_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ValueError, match=r'MINDDP_ACCELERATION must be "on" or "off", but is'):
        acceleration_is_on()
