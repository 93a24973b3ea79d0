"""Do the ranks agree on what they have wrapped, and how? An error at construction, not a hang or worse later.

Each rank describes its side, and fingerprints of the descriptions are compared: one small all-gather when all is
well. Only where they differ are the descriptions themselves exchanged, so that every rank can name the rank, the
parameter or option, and both sides.

What may differ without harm may differ: names of parameters, gradient_as_bucket_view, batched_grad_copy, and, as in
torch, the capacities of buckets, as long as all go by rank 0's.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from minddp.options import BucketCaps, Options
from minddp.platform import wording
from minddp.platform.store import next_serial
from minddp.transport.protocols import Transport

_log = logging.getLogger(__name__)
Named = Sequence[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Replica:
    """One rank's side, in words and numbers that can travel.

    `reduced` and `others` describe tensors by name, shape, strides and dtype: parameters to be reduced, and those
    that are only broadcast. `options` are to be equal everywhere. `caps` are the fields of a `BucketCaps`.
    """

    reduced: list[list[Any]]
    others: list[list[Any]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    caps: list[Any] = field(default_factory=list)

    @classmethod
    def of(
        cls, reduced: Named, others: Named, ignored: Collection[str], options: Options, **further: object
    ) -> Replica:
        """`further` are options by name that are to be equal, too."""
        caps = options.caps
        first_caps = caps.before_rebuild(order_is_final=not options.rebuilds_buckets)
        return cls(
            reduced=[_described(name, tensor) for name, tensor in reduced],
            others=[_described(name, tensor) for name, tensor in others],
            ignored=sorted(ignored),
            options={
                "find_unused_parameters": options.finds_unused_each_pass,
                "static_graph": options.static_graph,
                "skip_all_reduce_unused_params": options.skip_all_reduce_unused_params,
                "reduction": getattr(options.reduction, "__qualname__", options.reduction),
                "the buckets' first capacities in bytes": list(first_caps),
                "DDP_SET_LAST_BUCKET_CAP": options.small_last_bucket,
                **further,
            },
            caps=[caps.first_bytes, caps.rest_bytes, list(caps.each_bytes)],
        )

    def fingerprint(self) -> int:
        text = json.dumps(asdict(self)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")

    def bucket_caps(self) -> BucketCaps:
        first, rest, each = self.caps
        return BucketCaps(first, rest, tuple(each))


def verify_replicas_agree(transport: Transport, ours: Replica, device: torch.device) -> Replica:
    """Raise on every rank unless all agree. Returns rank 0's side. Collective; small tensors on `device`.

    Raises:
        RuntimeError: the replicas differ. Begins with torch's wording, where scripts match on it.
    """
    text = json.dumps(asdict(ours)).encode()
    header = torch.tensor([ours.fingerprint(), len(text)], dtype=torch.int64, device=device)
    headers = [header.tolist() for header in transport.all_gather(header)]
    if all(fingerprint == headers[0][0] for fingerprint, _ in headers):
        return ours
    padded = torch.zeros(max(length for _, length in headers), dtype=torch.uint8, device=device)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = zip(transport.all_gather(padded), headers, strict=True)
    replicas = [Replica(**json.loads(bytes(theirs[:length].tolist()))) for theirs, (_, length) in texts]
    disagreement = next(_disagreements(transport.rank, replicas), None)
    if disagreement is not None:
        raise RuntimeError(disagreement)
    if ours.caps != replicas[0].caps:
        _log.warning(
            f"The capacities of buckets here on rank {transport.rank} are not those on rank 0, which count (as in "
            f"torch): {replicas[0].bucket_caps()}."
        )
    return replicas[0]


def serial_number(names: Sequence[str], transport: Transport) -> str:
    """A name for a wrapper, the same on every rank; another one for each wrapper, even of equal models."""
    model = hashlib.blake2b(repr(list(names)).encode(), digest_size=8).hexdigest()
    store = transport.store
    return model if store is None else f"{model}/{next_serial(store, f'minddp/{model}', transport.rank)}"


def _described(name: str, tensor: torch.Tensor) -> list[Any]:
    return [name, list(tensor.shape), list(tensor.stride()), str(tensor.dtype)]


# ------------------------------------------------------------------ what differs, from the viewpoint of rank `rank`


def _disagreements(rank: int, replicas: Sequence[Replica]) -> Iterator[str]:
    """Sentences, the most telling one first. Each compares some rank with rank 0."""
    yield from _different_options([replica.options for replica in replicas])
    yield from _different_counts(rank, [replica.reduced for replica in replicas])
    yield from _different_params(rank, [replica.reduced for replica in replicas])
    yield from _ignored_elsewhere(replicas)
    yield from _different_others([replica.others for replica in replicas])


def _different_options(options: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    names = {name: "not given" for of_rank in options for name in of_rank}
    shown = [names | {name: repr(value) for name, value in of_rank.items()} for of_rank in options]
    differing = [
        f"`{name}` is {shown[0][name]} on rank 0, but {theirs[name]} on rank {other}."
        for other, theirs in enumerate(shown)
        for name in names
        if theirs[name] != shown[0][name]
    ]
    if differing:
        yield "\n".join(["The ranks disagree on options of DistributedDataParallel:", *differing])


def _different_counts(rank: int, params: Sequence[list[list[Any]]]) -> Iterator[str]:
    for other, theirs in enumerate(params):
        if len(theirs) != len(params[0]):
            # Torch's sentence is from this rank's viewpoint, so it must name a rank that differs from it.
            here = len(params[rank])
            peer = next(i for i, described in enumerate(params) if len(described) != here)
            yield (
                f"DDP expects same model across all ranks, but Rank {rank} has {here} params, while rank "
                f"{peer} has inconsistent {len(params[peer])} params.\n"
                f"Parameters that rank 0 and rank {other} do not share: {_not_shared(params[0], theirs)}. "
                f"Build the same module on every rank, with the same parameters requiring grad."
            )


def _different_params(rank: int, params: Sequence[list[list[Any]]]) -> Iterator[str]:
    for other, theirs in enumerate(params):
        for index, (mine, yours) in enumerate(zip(params[0], theirs, strict=False)):
            if mine[1:] == yours[1:]:
                continue
            aspect, left, right = next(
                (aspect, a, b)
                for aspect, a, b in zip(("sizes", "strides", "dtype"), mine[1:], yours[1:], strict=True)
                if a != b
            )
            process = "this process" if other == rank else f"process {other}"
            yield (
                f"[{rank}]: params[{index}] in {process} with sizes {yours[1]} appears not to match {aspect} "
                f"of the same param in process 0.\n"
                f"`{mine[0]}` has {aspect} {left} on rank 0; "
                f"{'it' if yours[0] == mine[0] else f'`{yours[0]}`'} has {right} on rank {other}. "
                f"Build the same module on every rank before wrapping it."
            )


def _ignored_elsewhere(replicas: Sequence[Replica]) -> Iterator[str]:
    """What one rank leaves alone while another reduces it would be summed with a neighbour of the same shape."""
    for rank, replica in enumerate(replicas):
        for other, elsewhere in enumerate(replicas):
            names = {described[0] for described in replica.reduced}.intersection(elsewhere.ignored)
            if names:
                it = "them" if len(names) > 1 else "it"
                yield (
                    f"The ranks disagree on what to ignore (`_ddp_params_and_buffers_to_ignore`): rank {rank} "
                    f"reduces {wording.names(sorted(names))}, but rank {other} ignores {it}."
                )


def _different_others(others: Sequence[list[list[Any]]]) -> Iterator[str]:
    """Buffers, and parameters that are not trained. Their strides do not matter to a broadcast."""
    for other, theirs in enumerate(others):
        if len(theirs) != len(others[0]):
            yield (
                f"Rank 0 broadcasts {len(others[0])} buffers and frozen parameters, but rank {other} expects "
                f"{len(theirs)}. Those that they do not share: {_not_shared(others[0], theirs)}. Ignore what is a "
                f"rank's own (`_ddp_params_and_buffers_to_ignore`)."
            )
        for mine, yours in zip(others[0], theirs, strict=False):
            if (mine[1], mine[3]) != (yours[1], yours[3]):
                yield (
                    f"`{mine[0]}` on rank 0 has sizes {mine[1]} and is {mine[3]}, but `{yours[0]}` on rank {other} "
                    f"has sizes {yours[1]} and is {yours[3]}. One is to be broadcast to the other."
                )


def _not_shared(one: list[list[Any]], other: list[list[Any]]) -> str:
    names = {described[0] for described in one} ^ {described[0] for described in other}
    return ", ".join(sorted(names)) or "none by name"
