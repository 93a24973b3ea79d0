"""On a GPU: what does a wrapper add to a step, in time, launches and memory, beside torch's own at its best?

    python -m benchmarks.gpu                 # all parts, some minutes; as many ranks as there are cards, over NCCL
    python -m benchmarks.gpu copies gpt2     # some parts; what the file says of others stays

| what | file |
|---|---|
| the command, and the file that each part is written to as soon as it is done | `__main__.py` |
| the card, and all else that figures depend on | `card.py` |
| seconds by the device, kernels by a profile | `device.py` |
| models whose steps are timed | `models.py` |
| each contestant by itself, then all in a race | `steps.py` |
| copies, the fused pack and torch's kernels | `copies.py` |
| what was aimed at | `aims.py` |
| tables on the terminal | `tables.py` |

Time is the device's, between two events around a turn; see [Note: paired rounds] for who races whom. Kernels and
copies are counted in a profile of one step, memory is the allocator's peak over the first steps of each contestant
by itself. What was aimed at stands beside each figure. Needs neither torchvision nor tyro.
"""
