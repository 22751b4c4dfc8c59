"""One thread: the tests' tensors are small, and starting threads costs more than they bring."""

import torch

torch.set_num_threads(1)
