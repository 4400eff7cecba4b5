"""Time to trace and plan a program of N layers, beside JAX's for the same program, in one run.

A layer is all_gather, matmul, silu, matmul, reduce_scatter. ``straight`` writes them out one after
the other; ``nested`` calls one decorated layer N times. JAX (if it can be imported) does
``jit(shard_map(...)).trace().lower()``. Each is the best of a few runs, by the wall and by the CPU
time of the process, which other work on the machine disturbs less.

    python benchmarks/trace.py 100 1000 [--json benchmarks/results/trace.json]
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import time
from collections.abc import Callable
from typing import Any

REPEATS = 7


def best(fn: Callable[[], object]) -> dict[str, float]:
    """Seconds of the best of a few runs, after one that is not counted."""
    fn()
    clocks = {"wall": time.perf_counter, "cpu": time.process_time}
    times: dict[str, list[float]] = {name: [] for name in clocks}
    for _ in range(REPEATS):
        start = {name: clock() for name, clock in clocks.items()}
        fn()
        for name, clock in clocks.items():
            times[name].append(clock() - start[name])
    return {name: round(min(found), 4) for name, found in times.items()}


def with_iris(layers: int, nested: bool) -> dict[str, float]:
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


def with_jax(layers: int) -> dict[str, float] | None:
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


def machine() -> dict[str, Any]:
    import torch

    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = {line.partition(": ")[2].strip() for line in file if line.startswith("model name")}
    found = {"cpu": ", ".join(sorted(names)), "cores": os.cpu_count()}
    found |= {"python": platform.python_version(), "torch": torch.__version__}
    if importlib.util.find_spec("jax"):
        found["jax"] = importlib.metadata.version("jax")
    return found


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
        print(row)  # noqa: T201
    if options.json:
        text = json.dumps({"machine": machine(), "seconds": rows}, indent=1)
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
