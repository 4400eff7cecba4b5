"""A tensor-parallel block of a real model, end to end: ``python -m iris.demo --ranks 4``."""
