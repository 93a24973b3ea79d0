r"""Training with the same bits on any number of ranks, which goes on when ranks are lost.

[Note: logical ranks]
Floating-point addition in another order gives other bits, so the result of a training depends on the number of its
ranks. Here each batch is cut into a fixed number of *shares*, the micro-batches of as many *logical ranks*. A share
gives the same result on any rank:

  - forward and backward of each share run separately, with a random state that depends on the step and the share;
  - each share begins with the step's initial buffers; the buffers of share 0 are kept, as those of rank 0 in DDP;
  - one fixed binary tree over the shares adds their gradients.

                 (0..3)                  8 shares would add (4..7) on the right, and a root
               /        \
           (0,1)         (2,3)           a rank that computes shares 0 to 2 sends two sums:
          /     \       /     \          (0,1), and 2
         0       1     2       3

So the ranks may change between steps, and a training can go on when some are lost. See [Note: generations], and
docs/elastic.md for the files of this part.
"""
