"""`minddp doctor`: check in seconds, before a job, whether a distributed job will work here.

    minddp doctor --nproc-per-node 2
    torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host:29400 --nproc-per-node 8 -m minddp doctor

The ranks meet at the store, exchange fact sheets, connect, and measure. Pure functions turn facts into findings.

| file | content |
|---|---|
| `doctor_command.py` | the command line: starts the ranks or is one of them |
| `examination.py` | the checks in their order |
| `store_connection.py` | a rank's place in the job; the connection to the store |
| `store_exchange.py` | messages through the store |
| `fact_sheet.py` | what a rank knows about itself, its host and its network |
| `measurement.py` | connections between ranks, load, speed of collectives |
| `rank_verdicts.py`, `network_verdicts.py` | facts and measurements in, findings out |
| `findings.py` | a finding; the report |
"""
