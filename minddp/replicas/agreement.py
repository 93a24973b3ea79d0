"""A check at construction that the ranks agree on what they have wrapped, and with which options.

Each rank describes its replica, and the ranks compare fingerprints of the descriptions. If these differ, they
exchange the descriptions, so that every rank can name the ranks, the parameter or option, and both values. Names of
parameters, gradient_as_bucket_view and batched_grad_copy may differ. So may the capacities of rebuilt buckets: rank
0's are used, as in torch.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from minddp.options import BucketCaps, Options
from minddp.platform import wording
from minddp.platform.store import next_serial
from minddp.transport.protocols import Transport

_log = logging.getLogger(__name__)
Named = Sequence[tuple[str, torch.Tensor]]


class _TensorSpec(NamedTuple):
    name: str
    sizes: list[int]
    strides: list[int]
    dtype: str


@dataclass(frozen=True)
class Replica:
    """The description of one rank's replica.

    `reduced` are the parameters to reduce, `others` the tensors that are only broadcast. `options`, by name, must
    be equal on all ranks.
    """

    reduced: list[_TensorSpec]
    others: list[_TensorSpec] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    caps: BucketCaps = field(default_factory=lambda: BucketCaps(0, 0))

    @classmethod
    def of(
        cls, reduced: Named, others: Named, ignored: Collection[str], options: Options, **further: object
    ) -> Replica:
        """`further` options must be equal on all ranks, too."""
        first_caps = options.caps.before_rebuild(order_is_final=not options.rebuilds_buckets)
        return cls(
            reduced=[_spec_of(name, tensor) for name, tensor in reduced],
            others=[_spec_of(name, tensor) for name, tensor in others],
            ignored=sorted(ignored),
            options={
                "find_unused_parameters": options.finds_unused_each_pass,
                "static_graph": options.static_graph,
                "skip_all_reduce_unused_params": options.skip_all_reduce_unused_params,
                "the buckets' first capacities in bytes": first_caps,
                "DDP_SET_LAST_BUCKET_CAP": options.small_last_bucket,
                **further,
            },
            caps=options.caps,
        )


def verify_replicas_agree(transport: Transport, ours: Replica, device: torch.device) -> Replica:
    """Raise on every rank unless all agree. Returns rank 0's replica. Collective; sends small tensors on `device`.

    Raises:
        RuntimeError: the replicas differ. The message begins with torch's wording where scripts match on it.
    """
    text = pickle.dumps(ours)
    header = torch.tensor([_fingerprint_of(ours), len(text)], dtype=torch.int64, device=device)
    headers = [header.tolist() for header in transport.all_gather(header)]
    if all(fingerprint == headers[0][0] for fingerprint, _ in headers):
        return ours
    padded = torch.zeros(max(length for _, length in headers), dtype=torch.uint8, device=device)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = zip(transport.all_gather(padded), headers, strict=True)
    replicas: list[Replica] = [pickle.loads(bytes(theirs[:length].tolist())) for theirs, (_, length) in texts]
    for disagreement in _disagreements(transport.rank, replicas):
        raise RuntimeError(disagreement)
    if ours.caps != replicas[0].caps:
        _log.warning(
            f"The bucket capacities on rank {transport.rank} are not those on rank 0, which apply (as in torch): "
            f"{replicas[0].caps}."
        )
    return replicas[0]


def are_equal_everywhere(transport: Transport, value: object, device: torch.device) -> bool:
    """True if all ranks pass values of the same `repr`. Collective; sends a small tensor on `device`."""
    fingerprint = torch.tensor([_fingerprint_of(value)], dtype=torch.int64, device=device)
    return all(torch.equal(theirs, fingerprint) for theirs in transport.all_gather(fingerprint))


def serial_number(names: Sequence[str], transport: Transport) -> str:
    """A name for a wrapper, equal on all ranks and different for each wrapper, even around equal models."""
    model = hashlib.blake2b(repr(list(names)).encode(), digest_size=8).hexdigest()
    store = transport.store
    return model if store is None else f"{model}/{next_serial(store, f'minddp/{model}', transport.rank)}"


def _fingerprint_of(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "big")


def _spec_of(name: str, tensor: torch.Tensor) -> _TensorSpec:
    return _TensorSpec(name, list(tensor.shape), list(tensor.stride()), str(tensor.dtype))


# ------------------------------------------------------------------ messages on rank `rank`


def _disagreements(rank: int, replicas: Sequence[Replica]) -> Iterator[str]:
    """The most specific message comes first. Each compares some rank with rank 0."""
    yield from _different_options([replica.options for replica in replicas])
    reduced, others = ([getattr(replica, name) for replica in replicas] for name in ("reduced", "others"))
    remedy = "Build the same module on every rank before wrapping it, with the same parameters requiring grad."
    yield from _different_tensors(rank, reduced, "params", ("sizes", "strides", "dtype"), remedy)
    yield from _ignored_elsewhere(replicas)
    remedy = "They are broadcast from rank 0. Ignore those of one rank only (`_ddp_params_and_buffers_to_ignore`)."
    yield from _different_tensors(rank, others, "buffers and frozen params", ("sizes", "dtype"), remedy)


def _different_options(options: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    differing = []
    for other, theirs in enumerate(options):
        for name in {**options[0], **theirs}:
            zeros, others = (repr(each[name]) if name in each else "not given" for each in (options[0], theirs))
            if zeros != others:
                differing.append(f"`{name}` is {zeros} on rank 0, but {others} on rank {other}.")
    if differing:
        yield "\n".join(["The ranks disagree. Use the same arguments on every rank:", *differing])


def _different_tensors(
    rank: int, lists: Sequence[list[_TensorSpec]], noun: str, aspects: Sequence[str], remedy: str
) -> Iterator[str]:
    for other, theirs in enumerate(lists):
        if len(theirs) != len(lists[0]):
            peer = next(i for i, specs in enumerate(lists) if len(specs) != len(lists[rank]))
            not_shared = {spec.name for spec in lists[0]} ^ {spec.name for spec in theirs}
            yield (
                f"DDP expects same model across all ranks, but Rank {rank} has {len(lists[rank])} {noun}, while "
                f"rank {peer} has inconsistent {len(lists[peer])} {noun}.\nRank 0 and rank {other} do not share: "
                f"{', '.join(sorted(not_shared)) or 'none by name'}. {remedy}"
            )
    for other, theirs in enumerate(lists):
        for index, (zeros, others) in enumerate(zip(lists[0], theirs, strict=False)):
            for aspect in aspects:
                left, right = getattr(zeros, aspect), getattr(others, aspect)
                if left != right:
                    process = "this process" if other == rank else f"process {other}"
                    name = "it" if others.name == zeros.name else f"`{others.name}`"
                    yield (
                        f"[{rank}]: {noun}[{index}] in {process} with sizes {others.sizes} appears not to match "
                        f"{aspect} of the same param in process 0.\n"
                        f"`{zeros.name}` has {aspect} {left} on rank 0; {name} has {right} on rank {other}. "
                        f"{remedy}"
                    )


def _ignored_elsewhere(replicas: Sequence[Replica]) -> Iterator[str]:
    """A parameter that another rank ignores would be summed with a different parameter of the same shape."""
    for rank, replica in enumerate(replicas):
        for other, elsewhere in enumerate(replicas):
            names = {spec.name for spec in replica.reduced}.intersection(elsewhere.ignored)
            if names:
                yield (
                    f"The ranks disagree on what to ignore (`_ddp_params_and_buffers_to_ignore`): rank {rank} "
                    f"reduces {wording.names(sorted(names))}, which rank {other} ignores."
                )
