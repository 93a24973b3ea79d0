"""The reducer, but what goes wrong in it is noted in the logging data before it goes up."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch.distributed as dist

from minddp.core.reducer import Reducer

P = ParamSpec("P")
R = TypeVar("R")


def _noted(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    @functools.wraps(method)
    def noting_errors(self: LoggedReducer, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.note_error(error)
            raise

    return noting_errors


class LoggedReducer(Reducer):
    """`logger` is told of errors. The engine raises those of a backward past the wrapper, so it has to be here."""

    logger: dist.Logger

    become_static = _noted(Reducer.become_static)
    finish = _noted(Reducer.finish)
    _on_backward_end = _noted(Reducer._on_backward_end)

    def note_error(self, error: Exception) -> None:
        self.logger.set_error_and_log(str(error))

    def _unfinished(self) -> RuntimeError:
        return self._note(super()._unfinished())

    def _not_finalized(self) -> RuntimeError:
        return self._note(super()._not_finalized())

    def _note(self, error: RuntimeError) -> RuntimeError:
        self.note_error(error)
        return error
