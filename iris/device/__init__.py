"""What runs inside Triton kernels: memory operations on peers, signals, waits, barriers."""
