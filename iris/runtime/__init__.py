"""What runs under every program: ranks, the heap, groups, barriers, the launcher."""
