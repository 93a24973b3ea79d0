"""The environment variable MINDDP_ACCELERATION disables optimisations, for benchmarks and debugging.

With MINDDP_ACCELERATION=off a rank that waits for gloo sleeps at once instead of polling first ([Note: spin wait]),
and every gradient is copied into and out of its bucket instead of aliasing it. Results have the same bits either
way. Ranks may set it differently.
"""

from __future__ import annotations

import os

VARIABLE = "MINDDP_ACCELERATION"


def acceleration_is_on() -> bool:
    """True unless the variable is "off".

    Raises:
        ValueError: the variable is set to something other than "on" and "off".
    """
    value = os.environ.get(VARIABLE, "on")
    if value not in ("on", "off"):
        raise ValueError(f'{VARIABLE} must be "on" or "off", but is {value!r}.')
    return value == "on"
