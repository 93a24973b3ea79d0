"""The upper storey: tools that stand on the wrapper. Nothing below imports them.

| question | folder or file |
|---|---|
| which tools does `import minddp` attach to the wrapper, and how? | `wrapper.py`, by `minddp/extension.py` |
| is training right: do replicas differ, do ranks hang or come late? | `watchdog/` |
| where does the time of a step go? | `xray/` |
| how long would a step take on other ranks, links, buckets? | `forecast/` |
| can ranks be lost, or their number change, without changing a bit? | `elastic/` |
| will a job work on these machines? | `doctor/` |
| how is a script run with minddp in the place of torch's class? | `launch/` |
| how are the ranks of a job started, and where do they meet? | `job/`, for several tools |
| a training loop with all of this; models for it | `train/`, `tasks/`, `demo.py` |
"""
