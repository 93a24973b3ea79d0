"""Collectives among the ranks of one host: every rank can reach the others' memory, and no bytes are sent.

| question | file |
|---|---|
| what does a rank do in each collective? | `collectives.py` |
| in which order is a sum added? | `addition_order.py` |
| how do ranks share their progress? | `control_block.py` |
| how do they sleep, pass memory on, and notice that one has died? | `peer_sockets.py` |
| in which order are collectives begun, advanced and failed? | `progress_engine.py` |
| which thread does that, and when? | `host_communicator.py` |
| where is each rank's contribution stored? | `contributions.py` |
| what is shared memory? | `segments.py` |
| how do ranks find each other? | `rendezvous.py` |
| what does the wrapper use? | `shared_memory_transport.py` |
"""
