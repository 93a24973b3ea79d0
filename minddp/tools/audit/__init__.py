"""Audit: how much has each micro-batch of each rank really counted?

A gradient is linear in its micro-batches' gradients, so their weights can be measured, whatever averages them.
`sketch.py` projects a gradient to 64 numbers; `recorder.py` takes sketches of what each backward gives, whose
factor `loss.py` reads, and of what the optimizer gets; `auditing.py` gathers those of all ranks; `weights.py`
solves for the weights; `report.py` says what is wrong with them.
"""

from minddp.tools.audit.auditing import Audit as audit

__all__ = ["audit"]
