"""Broadcasts of what is small: it goes through the sockets themselves.

[Note: broadcasts]
What is broadcast in every step are buffers, some kilobytes. To put them into memory that all have mapped, to say
so, and to hear from everybody that they have been read before that memory is used again, takes more messages than
to send the bytes along. So they travel in the message. The kernel keeps it until it is taken in, and whoever
attends takes it in, whether somebody listens yet or not. So who broadcasts waits for nobody, and there is nothing
that it must not overwrite.

The broadcasts of one rank are heard in the order in which it makes them. Each says how many all-reduces have gone
before, so that one too many, of a rank that has evaluated alone, is not taken for the next. A time limit is only
for who listens; who broadcasts learns of a peer's end by its next call.
"""

from __future__ import annotations

from collections import deque

import torch

from minddp.transport.shared_memory.collective import Listener
from minddp.transport.shared_memory.ledger import SAME_CALLS
from minddp.transport.shared_memory.messages import Told


def content_of(tensor: torch.Tensor) -> bytes:
    """What to send of a tensor, of any strides."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8).numpy().tobytes()


class Hearing:
    """What one rank broadcasts: what it has told before somebody listened, or who listens before it tells."""

    def __init__(self) -> None:
        self.num_listened = 0
        self.told: deque[Told] = deque()
        self.listening: deque[Listener] = deque()

    def settle(self) -> None:
        """Bring what has been told to who listens.

        Raises:
            RuntimeError: that is not what is listened for.
        """
        while self.told and self.listening:
            (num_launched, content), listener = self.told.popleft(), self.listening[0]
            tensor = listener.tensor
            if (num_launched, len(content)) != (listener.num_launched, tensor.nbytes):
                raise RuntimeError(
                    f"{listener.name} brings {len(content):,} bytes, told after {num_launched} all-reduces, but "
                    f"{tensor.nbytes:,} bytes are listened for after {listener.num_launched}. {SAME_CALLS}"
                )
            with torch.inference_mode(tensor.is_inference()):  # a mode is each thread's own
                heard = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                tensor.copy_(heard.view(tensor.dtype).view(tensor.shape))
            self.listening.popleft().land()
