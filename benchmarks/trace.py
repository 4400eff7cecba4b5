"""Time to trace and plan a program of N layers, beside JAX's for the same program, in one run.

A layer is all_gather, matmul, silu, matmul, reduce_scatter. ``straight`` writes them out one after
the other; ``nested`` calls one decorated layer N times. JAX (if it can be imported) does
``jit(shard_map(...)).trace().lower()``.

    python benchmarks/trace.py 100 1000 [--json benchmarks/results/trace.json]
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

REPEATS = 5


def best(fn: Callable[[], object]) -> float:
    """Median seconds of a few runs, after one that is not counted."""
    fn()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def with_iris(layers: int, nested: bool) -> float:
    import torch
    import torch.nn.functional as F

    import iris
    from iris import P

    mesh = iris.AbstractMesh((4,), ("tp",))

    def one(x: Any, up: Any, down: Any) -> Any:
        h = F.silu(iris.all_gather(x, "tp", dim=0) @ up)
        return iris.reduce_scatter(h @ down, "tp", dim=0)

    layer = iris.spmd(one) if nested else one
    x, up, down = torch.empty(8, 16), torch.empty(16, 4), torch.empty(4, 16)

    def run() -> object:
        @iris.spmd(mesh=mesh, in_specs=(P("tp"), P(None, "tp"), P("tp")), out_specs=P("tp"))
        def net(x: Any, ups: Any, downs: Any) -> Any:
            for u, d in zip(ups, downs, strict=True):
                x = layer(x, u, d)
            return x

        return net.trace(x, [up] * layers, [down] * layers).lower()

    return best(run)


def with_jax(layers: int) -> float | None:
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    try:
        import jax
        import jax.numpy as jnp
    except ImportError:
        return None
    spec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))

    def run() -> object:
        def net(x: Any, ups: Any, downs: Any) -> Any:
            for u, d in zip(ups, downs, strict=True):
                h = jax.nn.silu(jax.lax.all_gather(x, "tp", axis=0, tiled=True) @ u)
                x = jax.lax.psum_scatter(h @ d, "tp", scatter_dimension=0, tiled=True)
            return x

        specs = (spec("tp", None), spec(None, "tp"), spec("tp", None))
        mapped = jax.shard_map(net, mesh=mesh, in_specs=specs, out_specs=spec("tp", None))
        args = (jnp.zeros((32, 16)), [jnp.zeros((16, 16))] * layers, [jnp.zeros((16, 16))] * layers)
        return jax.jit(mapped).trace(*args).lower()

    return best(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("layers", type=int, nargs="+")
    parser.add_argument("--json")
    options = parser.parse_args()
    rows = []
    for layers in options.layers:
        row = {
            "layers": layers,
            "iris straight": with_iris(layers, nested=False),
            "iris nested": with_iris(layers, nested=True),
            "jax": with_jax(layers),
        }
        rows.append(row)
        print({name: round(value, 3) if value else value for name, value in row.items()})  # noqa: T201
    if options.json:
        import torch

        machine = {"cores": os.cpu_count(), "python": platform.python_version()}
        text = json.dumps(
            {"machine": machine, "torch": torch.__version__, "seconds": rows}, indent=1
        )
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
