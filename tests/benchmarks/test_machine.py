"""The machine's description says what is needed to compare figures and nothing that identifies it."""

from __future__ import annotations

import getpass
import json
import os
import platform

from benchmarks import machine


def test_the_description_is_complete_and_anonymous():
    description = machine.describe()
    assert set(description) == {"cpu", "cores", "memory_gib", "os", "python", "torch"}
    assert all(description.values())
    text = json.dumps({key: value for key, value in description.items() if key != "os"})
    assert platform.node() not in json.dumps(description)
    assert os.sep + "home" not in text
    assert getpass.getuser() not in text
