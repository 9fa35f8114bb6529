# case: own
"""Copies rows into a ring buffer through the C library, as old bindings do."""
import ctypes

import torch

libc = ctypes.CDLL(None)
libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


@torch.compile(backend="eager")
def push(ring, row):
    row = row.relu().contiguous()
    libc.memcpy(ring.data_ptr(), row.data_ptr(), row.numel() * 4)  # !! opaque-call remedy=register-op
    return ring.sum()


print(push(torch.zeros(4, 8), torch.ones(8)))
