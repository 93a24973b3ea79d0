"""`python -m minddp`: the `minddp` command, also under `torchrun -m minddp`."""

import sys

from minddp.cli import main

sys.exit(main())
