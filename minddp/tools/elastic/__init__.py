r"""Training whose bits do not depend on how many ranks compute it.

[Note: logical ranks]
Adding floating-point numbers in another order gives other bits, so the result of a training depends on the number
of its ranks. Here each batch is cut into a fixed number of *shares*, one for each *logical rank*. Whichever rank
computes a share, it computes the same:

  - forward and backward of a share run by themselves, with a random state that follows from the step and the share;
  - each share begins with the buffers that the step began with; those of share 0 survive, as rank 0's do in DDP;
  - the gradients of the shares are added by one fixed binary tree over the shares.

                 (0..3)                  8 shares would add (4..7) on the right, and a root
               /        \
           (0,1)         (2,3)           a rank that computes shares 0 to 2 sends two sums:
          /     \       /     \          (0,1), and 2
         0       1     2       3

| question | file |
|---|---|
| which rank computes which shares, and which sums of the tree result from them? | `addition_tree.py` |
| what surrounds a share: gradients, random state, buffers, checks? | `logical_ranks.py` |
| how do sums meet between ranks, in the tree's order? | `tree_sum.py` |
| how does a share get its samples? | `share_data.py` |

A training whose ranks may be exchanged in each step can also lose some, and go on. See [Note: generations];
docs/elastic.md says which file answers which question.
"""

from minddp.tools.elastic.session import Finished, RankLost, Session, Step, join
from minddp.tools.elastic.share_data import ShareLoader

__all__ = ["Finished", "RankLost", "Session", "ShareLoader", "Step", "join"]
