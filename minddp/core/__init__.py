"""The algorithm of data parallelism, without the transports. Begin with `reducer.py`.

The state of one backward is in its `BackwardPass`, which is dropped at the end. These survive a step:

| what | where | why |
|---|---|---|
| the plan and its buckets | `BucketStore` | allocated once; `lazy_bucket_allocation` keeps only the plan |
| the observed order, until the next forward | `BucketStore` | the rebuild is collective: not in backward |
| whether the buckets have been rebuilt | `BucketStore` | only once |
| which parameters were used under `no_sync` | `UsageMap` | the next synchronised backward reduces their sum |
| what a static graph has recorded | `StaticGraph` | later backwards are the same |
| which parameters were unused | `UsageTracker` | of a static graph: the recorded ones; else for logs and errors |
| whether a bucket may still share its memory | `Bucket` | never again once a script has kept such a gradient |
| whether a rank has left outputs | `UsageMap` | a further backward of that forward is then reduced, too |
| the nodes of the latest outputs, until the next forward | `FindUnused` | for a backward that enters elsewhere |
| hooks on the parameters | `GradientHooks` | they fire in every backward, if only to raise an error |
| futures of buffer hooks, until a backward ends | `Reducer.futures` | their forward may have no backward |
| how many backwards were synchronised | `Reducer.num_passes` | it names a backward on all ranks |
| which forward was entered last, and by a further backward | `Reducer` | it may enter at other outputs |
| whether the latest forward was synchronised | `Reducer` | a gradient that stays local after it is warned of |
| what was warned of | `UnfinishedReduction` | once each, such as each set of missing parameters |
| the weight of the next backward | `modes.Divisor` | `weigh` may come before the forward |
| which parameters the module has | `replicas.ModuleChangeCheck` | others would not be averaged |
| the buffer of delayed gradients | `modes.DelayedAllReduce` | allocated once; it has a reduction of its own |
| whether the last forward trained | the wrapper | otherwise buffers need no broadcast |
| rounding errors that were not sent yet | `comm_hooks.ErrorFeedback` | the next step's gradients include them |
"""
