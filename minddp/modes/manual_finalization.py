"""Manual finalization: the caller of backward decides when the averages are put into `.grad`. As torch 2.15."""

from __future__ import annotations

from typing import Any

from minddp.core.backward_pass import Phase
from minddp.core.reducer import Reducer
from minddp.options import check_flag


class ManualFinalization:
    """A base class of the wrapper. The attributes of the wrapper that it uses are declared here."""

    mixed_precision: Any
    _reducer: Reducer

    @property
    def require_manual_backward_finalization(self) -> bool:
        """True if the caller of backward calls `finalize_backward`. Set it before a forward."""
        return not self._reducer.finalizes_at_end

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        check_flag("require_manual_backward_finalization", required)
        if required:
            self._check_manual_backward_finalization_supported()
        if required != self.require_manual_backward_finalization and self._reducer.phase is not Phase.IDLE:
            raise RuntimeError(
                "require_manual_backward_finalization cannot be called after forward while a backward pass is "
                "expected or in progress: set it before forward or after backward finalization."
            )
        self._reducer.finalizes_at_end = not required

    def _check_manual_backward_finalization_supported(self) -> None:
        if not self._reducer.params:
            raise RuntimeError(
                "Manual backward finalization is not supported when all DDP parameters use "
                "delay_all_reduce_named_params."
            )

    def finalize_backward(self) -> None:
        """Wait for the reductions of the last backward and put the averages into `.grad`.

        Call it after backward, or within it as soon as all gradients of this module have arrived; but see
        `should_finalize_after_backward`.

        Raises:
            RuntimeError: it is not required, there is nothing to finalize, or some gradients have not arrived.
        """
        self._check_manual_backward_finalization_supported()
        self._reducer.finish()

    @property
    def should_finalize_after_backward(self) -> bool:
        """True if `finalize_backward` must not be called before the coming backward returns: torch's rule."""
        waits = self._reducer.awaits_order or self._reducer.usage_tracker.is_recording
        return self.require_manual_backward_finalization and (waits or self.mixed_precision is not None)
