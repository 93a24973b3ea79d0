"""Where minddp meets the autograd engine: four questions, each with one answer.

- When has this parameter's gradient been accumulated?  `Hooks`
- Which parameters will this very backward reach?       `will_be_reached`
- When is this backward over?                           `call_at_end_of_backward`
- Which backward is running, and inside another one?    `current_backward`, `inside_another_backward`

[Note: the hook sits on the accumulator]
Each leaf that requires grad owns one `AccumulateGrad` node, which adds incoming gradients to `.grad`. The hook
is a post-hook of that node, so it fires after `.grad` has its value, once per backward that reaches the leaf,
even when the gradient that arrived was undefined (a function returned None for it).
`Tensor.register_post_accumulate_grad_hook` would not fire then, and the bucket would wait for ever. The leaf
only holds a weak reference to its node, so whoever installs hooks must keep the nodes alive.

[Note: unused parameters]
To know which parameters a backward leaves out, torch walks the graph from the outputs in every forward. The
engine has computed the answer anyway: when backward begins it visits the whole graph to count dependencies.
So minddp asks the engine, at the first hook, whether it will run each accumulator. That takes no walk, needs
no copy of the outputs, and is exact for the loss at hand, also when the loss uses only some of the outputs.
Two things the engine does not tell, so then the graph is walked: what the distributed engine will reach; and, asked
once in the first backward, what the loss reaches although the outputs do not. Torch takes such parameters for
unused and raises when their gradient arrives after all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle, unserializable_hook


class Hooks:
    """Call `on_grad_accumulated(i, ...)` whenever a backward has given `params[i].grad` its value.

    Further positional arguments are the engine's own and of no interest. The callback is kept alive until the
    hooks are removed. `accumulators[i]` is the node of parameter i, kept alive as long as this object. See
    [Note: the hook sits on the accumulator].
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], on_grad_accumulated: Callable[..., None]):
        self._params = params
        self._on_grad_accumulated = on_grad_accumulated
        self._install()

    def _install(self) -> None:
        self.accumulators: list[Node] = [get_gradient_edge(param).node for param in self._params]
        self.handles: dict[int, RemovableHandle] = {}
        self._are_removed = False
        self.restore()

    def restore(self) -> None:
        """Put back those that `keep_only` has taken off."""
        if self._are_removed:
            return
        for index, node in enumerate(self.accumulators):
            if index not in self.handles:
                self.handles[index] = node.register_hook(partial(self._on_grad_accumulated, index))

    def keep_only(self, params: Collection[int]) -> None:
        """Take off all hooks but those of `params`."""
        for index in self.handles.keys() - params:
            self.handles.pop(index).remove()

    def renew(self) -> None:
        """Move to the accumulators that the parameters have now: one whose dtype has changed has a new one."""
        self.remove()
        self._install()

    def remove(self) -> None:
        """Detach from the parameters. May be called twice."""
        self._are_removed = True
        self.keep_only(())


def will_be_reached(accumulator: Node) -> bool:
    """Whether the backward that is running will run this node. See [Note: unused parameters]."""
    try:
        return bool(torch._C._will_engine_execute_node(accumulator))
    except RuntimeError:
        if current_backward() < 0:
            raise
        return False  # autograd.grad() was asked for this very gradient: it is returned, and not accumulated


def out_of_reach_of(output: Any, accumulators: Sequence[Node]) -> list[int]:
    """The nodes, as indices, that no path leads to from the tensors in `output`.

    A walk over the whole graph, for when the engine cannot be asked. See [Note: unused parameters].
    """
    seen: set[Node] = set()
    ahead = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
    while ahead:
        node = ahead.pop()
        if node not in seen:
            seen.add(node)
            ahead += [following for following, _ in node.next_functions if following is not None]
    return [index for index, node in enumerate(accumulators) if node not in seen]


def call_at_end_of_backward(callback: Callable[[], Any]) -> None:
    """Call back when the backward that is running has computed everything; not if it raises.

    Inside a nested backward (reentrant checkpointing) this means the nested one.
    """
    Variable._execution_engine.queue_callback(callback)


def current_backward() -> int:
    """A number for the backward that is running; a nested one has its own."""
    return torch._C._current_graph_task_id()


def inside_another_backward() -> bool:
    """In an end-of-backward callback: whether an outer backward is still running."""
    return torch._C._current_autograd_node() is not None


def call_when_gradient_enters(output: Any, callback: Callable[[], None]) -> None:
    """Call back whenever a backward reaches a tensor within `output`, in the backward that the user called.

    The parameters' own hooks cannot tell which that is: under reentrant checkpointing they fire in nested
    backwards, and the end of a nested backward is not the end. `callback` is a method; its object is
    referenced weakly, since the output may outlive the wrapper.
    """
    weak_callback = weakref.WeakMethod(callback)

    @unserializable_hook
    def on_gradient(_grad: torch.Tensor) -> None:
        method = weak_callback()
        if method is not None:
            method()

    for tensor in tensors_in(output):
        if tensor.grad_fn is not None:
            tensor.register_hook(on_gradient)


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """The tensors within nested lists, tuples, dicts, dataclasses and references to values of this process."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif hasattr(value, "local_value") and value.is_owner():  # an RRef, of torch's RPC
        yield from tensors_in(value.local_value())
