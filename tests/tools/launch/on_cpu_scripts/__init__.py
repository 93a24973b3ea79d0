"""Training scripts that ask for CUDA and NCCL, as public ones do, and know nothing of minddp."""
