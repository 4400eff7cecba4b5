"""Measurements: ``python -m iris.bench``. Peers run in the same processes and the same run."""
