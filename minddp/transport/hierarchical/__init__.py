r"""All-reduce for groups that span hosts: inside a host through memory, between hosts by gloo, and no byte twice.

A flat ring does not know where its ranks are. Every rank sends nearly twice the bucket to its neighbour, so each
border between two hosts is crossed by nearly twice the bucket, and by more the more ranks a host has. But the hosts
only need to tell each other one sum each.

[Note: add up, cross, spread]
Each bucket is cut into as many chunks as the smallest host has ranks. Chunk i belongs to *lane* i: the ranks that
are number i on their host, one from each. An all-reduce is then

          host A                        host B
     rank 0      rank 1            rank 2      rank 3
    +-------+   +-------+         +-------+   +-------+
    |chunk 0|   |chunk 0|         |chunk 0|   |chunk 0|     lane 0: ranks 0 and 2
    |- - - -|   |- - - -|         |- - - -|   |- - - -|
    |chunk 1|   |chunk 1|         |chunk 1|   |chunk 1|     lane 1: ranks 1 and 3
    +-------+   +-------+         +-------+   +-------+

    1. add up   in memory, rank 0 adds chunk 0 of ranks 0 and 1, and rank 1 adds their chunk 1; host B likewise
    2. cross    lane 0 all-reduces chunk 0 by gloo, and lane 1 at the same time chunk 1
    3. spread   rank 0 writes chunk 0 into the bucket of rank 1, and rank 1 chunk 1 into that of rank 0

Steps 1 and 3 are the all-reduce of `shared_memory/`, which is also how ranks on a host meet, tell each other what
is in and what is done, and notice who has died; step 2 comes in between. With one lane a single rank of each host
would do all the work; with several it is shared, and the bytes between the hosts are the same.

A chunk crosses in pieces, so that the first is on its way while the next is added up, and is spread while the next
is on its way: [Note: pieces] in `exchange.py`.

[Note: what crosses]
Bytes that leave a host, for a bucket of N bytes, W ranks and H hosts; as many arrive:

    flat ring, the ranks of a host next to each other     2 (W-1)/W  N
    flat ring, ranks dealt out to the hosts in turn       2 (W-1)/W  N  for each rank of a host
    lanes                                                 2 (H-1)/H  N

Two hosts with two ranks each: 1.5 N, 3 N, and N. Nothing that adds up whole numbers of gradients on both hosts can
do with less than N, since each host must hear of all that the other has.

[Note: the order of addition between hosts]
The bits are not those of gloo's flat ring, nor of torch's DDP: (a + b) + (c + d) is not ((a + b) + c) + d. They are
as fixed as those, though, equal on all ranks, and depend only on the placement of the ranks and on the tensor:

    first     the ranks of each host, as gloo adds them when they are a group of their own; in chunk i the last
              to join is the host's rank number i                       [Note: the order of addition], `order.py`
    then      the hosts, in the order of their lowest ranks, as gloo adds a piece among as many ranks

With one host that is the shared memory's order, with one rank on each host gloo's, both gloo's own; and with two
hosts of two there is only one way to read it, whatever the pieces.

Which ranks share a host: `hosts.py`. How an exchange in memory waits for what crosses: `exchange.py`; what carries
it across: `lane.py`. What is used where there is no hierarchy, and what cannot be added up so: `transport.py`.
"""

from minddp.transport.hierarchical.hosts import Hosts
from minddp.transport.hierarchical.transport import HierarchicalTransport, connect_hosts

__all__ = ["HierarchicalTransport", "Hosts", "connect_hosts"]
