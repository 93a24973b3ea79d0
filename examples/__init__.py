"""Rooms of one's own: parts that one may add to minddp without changing it, each in a file of at most 80 lines.

| file | which part | how it is put in |
|---|---|---|
| `bytes_by_bucket.py` | an observer of events | `ddp.events.watch(sink)` |
| `top_k_hook.py` | a communication hook with a state | `ddp.register_comm_hook(state, hook)` |
| `bucket_per_block.py` | a bucket policy | `ddp.follow(plan)` |
| `uneven_batches.py` | a check of the guard | `ddp.guard.checks[name] = check` |
| `sharded_optimizer.py` | an optimizer beside the wrapper | instead of the optimizer |
| `cs336.py` | adapters for a course | in its tests; docs/courses.md |
| `ranks_as_threads.py` | a transport; DDP in a debugger | `transport=transport` |

They use public names only. tests/examples trains with each, beside torch's class.
"""
