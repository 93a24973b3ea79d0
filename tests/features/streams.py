"""Streams for a machine that has none: torch's wrapper asks for them even where there is only a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from tests.conformance.cpu_stand_ins import Event, Stream


@contextmanager
def streams_of_a_cpu() -> Iterator[None]:
    """Within, they can be made, and do nothing: on a CPU all work is done when a call returns."""
    with (
        mock.patch("torch.Stream", Stream),
        mock.patch("torch.Event", Event),
        mock.patch("torch.accelerator.current_stream", Stream),
    ):
        yield
