"""Audit: how much has each micro-batch of each rank really counted?

    with minddp.audit(model, optimizer) as a:  # or `minddp audit train.py`
        train_some_steps()
    a.explain()

A gradient is linear in its micro-batches' gradients. So the weights can be measured, for any wrapper and any way of
averaging, and nothing that trains is changed:

1. `sketch.py`: a gradient becomes 64 numbers, by a random projection that is the same on all ranks.
2. `recorder.py`: each backward's gradient is sketched as it arrives, and `.grad` before the optimizer's step.
   `loss.py` reads by which factor a script has multiplied its loss.
3. `auditing.py`: the ranks' sketches meet on rank 0, through the store.
4. `weights.py`: least squares solves `.grad` = the sum of weight x micro-batch's gradient.
5. `verdict.py`: what is wrong with these weights; `report.py` shows it.
"""

from minddp.tools.audit.auditing import Audit, audit_process
from minddp.tools.audit.report import Report

audit = Audit

__all__ = ["Audit", "Report", "audit", "audit_process"]
