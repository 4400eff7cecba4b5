"""What ``IRIS_CHECK=1`` adds: the order of every access to the heap is checked, on CPU ranks."""
