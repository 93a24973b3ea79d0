"""The points in a synchronised backward at which a mode (low precision, RPC, an overlapped optimizer) is called."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minddp.core.bucket import Bucket


class Mode:
    """Called by the reducer, in the order of these methods. Each does nothing unless overridden."""

    #: If a second backward of one forward cannot add to the gradients of the first: why not.
    why_not_twice = ""

    def post_forward(self) -> None:
        """A forward has returned, and its backward will be synchronised. Called in the thread of the forward."""

    def backward_begins(self) -> None:
        """A gradient has entered at the outputs; none has reached a parameter yet.

        Not called if the outputs are hidden in objects that are not searched for tensors.
        """

    def shadow_begins(self) -> None:
        """This rank has run out of inputs, and joins a backward of the others with zeros. See modes/join.py."""

    def first_gradient(self, param: int) -> None:
        """The gradient of `param` is the first to arrive in this backward; none is packed yet."""

    def before_pack(self, params: Sequence[int]) -> None:
        """The gradients of these parameters have arrived and are about to be packed."""

    def before_launch(self, bucket: Bucket, contents: torch.Tensor) -> None:
        """`contents` are about to be reduced: the bucket's, or zeros on a rank that has run out of inputs."""

    def before_unpack(self) -> None:
        """Backward has computed all gradients. No bucket has been waited for or unpacked."""

    def after_unpack(self, bucket: Bucket) -> None:
        """The averages of a bucket are in the gradients, or the bucket was skipped."""

    def post_backward(self) -> None:
        """The averages of all buckets are in the gradients, or an exception has ended the backward."""
