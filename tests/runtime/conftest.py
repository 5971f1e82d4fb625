"""Before any test of the runtime: one thread of compute for each process.

The tests run beside each other, and their tensors are small: threads that wait for each other on a
busy machine took thirty times as long as one alone (`test_replay.py`: 86 s and 2 s).
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start

try:
    import torch
except ImportError:  # the tests themselves skip then
    pass
else:
    torch.set_num_threads(1)
