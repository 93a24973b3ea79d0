"""Events: any number of sinks, the cost of none, and errors that are reported."""

from __future__ import annotations

import pytest

from minddp.core.events import Event, EventKind, EventStream


def test_every_sink_gets_every_event_in_order() -> None:
    stream = EventStream()
    one: list[Event] = []
    other: list[Event] = []
    stream.emit(EventKind.FORWARD_BEGIN)
    stream.watch(one.append)
    stream.emit(EventKind.PARAM_READY, 3)
    stream.watch(other.append)
    stream.emit(EventKind.BACKWARD_END)
    assert one == [Event(EventKind.PARAM_READY, 3), Event(EventKind.BACKWARD_END)]
    assert other == one[1:]
    stream.unwatch(one.append)
    stream.unwatch(one.append)
    stream.emit(EventKind.BUCKET_READY, 0)
    assert (len(one), len(other)) == (2, 2)


def test_a_single_sink_is_called_directly_and_without_sinks_nothing_is() -> None:
    """The hook of every parameter asks for `sink`. See [Note: the hook is bound]."""
    stream = EventStream()
    assert stream.sink is None
    seen: list[Event] = []
    sink = seen.append
    stream.watch(sink)
    assert stream.sink is sink
    stream.unwatch(sink)
    assert stream.sink is None


def test_an_event_prints_its_kind_and_its_subject_if_it_has_one() -> None:
    assert str(Event(EventKind.BUCKET_LAUNCHED, 0)) == "bucket launched: 0"
    assert str(Event(EventKind.BACKWARD_BEGIN)) == "backward begins"


def test_kinds_print_differently() -> None:
    assert len({kind.value for kind in EventKind}) == len(EventKind)


def test_errors_are_reported_and_raised() -> None:
    stream = EventStream()
    reported: list[Exception] = []
    with pytest.raises(KeyError), stream.reporting():
        raise KeyError("nothing watches")
    stream.on_error = reported.append
    error = ValueError("about to be raised")
    assert stream.report(error) is error
    with pytest.raises(KeyError), stream.reporting():
        raise KeyError("raised")
    with stream.reporting():
        pass
    assert list(map(repr, reported)) == ["ValueError('about to be raised')", "KeyError('raised')"]
