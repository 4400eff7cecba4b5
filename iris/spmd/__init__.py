"""Functions to programs: the decorator, specs, meshes, tracing and the cache of programs."""
