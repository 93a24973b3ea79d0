r"""Training with the same bits on any number of ranks, which goes on when ranks are lost.

[Note: logical ranks]
Floating-point addition in another order gives other bits, so the result of a training depends on the number of its
ranks. Here each batch is cut into a fixed number of *shares*, one for each *logical rank*. A share gives the same
result on any rank:

  - forward and backward of each share run separately, with a random state that depends on the step and the share;
  - each share begins with the step's initial buffers; the buffers of share 0 are kept, as those of rank 0 in DDP;
  - one fixed binary tree over the shares adds their gradients.

                 (0..3)                  8 shares would add (4..7) on the right, and a root
               /        \
           (0,1)         (2,3)           a rank that computes shares 0 to 2 sends two sums:
          /     \       /     \          (0,1), and 2
         0       1     2       3

| question | file |
|---|---|
| Which rank computes which shares, and which sums of the tree? | `addition_tree.py` |
| What is done before and after each share: gradients, random state, buffers, checks? | `logical_ranks.py` |
| How are sums of several ranks added in the order of the tree? | `tree_sum.py` |
| Where do the samples of a share come from? | `share_data.py` |

So the ranks may change between steps, and a training can go on when some are lost. See [Note: generations];
docs/elastic.md lists the files of this part.
"""

from minddp.tools.elastic.session import Finished, RankLost, Session, Step, join
from minddp.tools.elastic.share_data import ShareLoader

__all__ = ["Finished", "RankLost", "Session", "ShareLoader", "Step", "join"]
