"""From graphs to runnable programs: plans, lowerings, kernels."""
