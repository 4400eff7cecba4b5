"""``iris.tune``: measure the ways in which a program's stages can run, and keep the fastest."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.table import Table

from iris.errors import UnsupportedError
from iris.lower import tuned
from iris.lower.choices import ALGORITHMS
from iris.runtime.benching import do_bench
from iris.runtime.context import current
from iris.runtime.groups import Group
from iris.spmd.agreement import group_of
from iris.spmd.control import Controller
from iris.spmd.decorator import SpmdFunction, SpmdMethod

CALLS = 20


@dataclass(frozen=True)
class Tuning:
    """What ``iris.tune`` found: microseconds of a call of the program, by stage and algorithm."""

    name: str
    times: tuned.Times

    def __rich__(self) -> Table:
        table = Table(title=f"{self.name}: us a call of the program", title_justify="left")
        for heading in ("stage", *ALGORITHMS, "kept"):
            table.add_column(heading)
        for stage, times in self.times.items():
            figures = (f"{times[way]:.1f}" if way in times else "" for way in ALGORITHMS)
            table.add_row(stage, *figures, min(times, key=times.__getitem__))
        return table


def tune(fn: SpmdFunction | SpmdMethod | Any, *args: Any, **kwargs: Any) -> Tuning:
    """Measure every algorithm of every stage of a call, and use the fastest from now on.

    Collective over the program's mesh; the slowest rank's time counts, and all ranks keep the same.
    The program is called many times on these arguments. What was measured is written to the cache
    folder (``IRIS_CACHE_DIR``) and serves later runs on the same hardware with the same versions.
    ``fn`` is a decorated function, method or module. Raises ``UnsupportedError`` for a program that
    writes to its arguments, for one on a local mesh, and where stages run as torch ops, which have
    one way.

    Example::

        iris.tune(mlp, x, w_up, w_down)
        print(mlp.explain(x, w_up, w_down))       # says: measured
    """
    call = fn if isinstance(fn, SpmdFunction | SpmdMethod) else fn.forward
    function = call if isinstance(call, SpmdFunction) else call._function
    if isinstance(function._options.mesh, Controller):
        raise UnsupportedError(
            f"{function._options.name}: tune measures on ranks, not through a local mesh",
            help="run the script with torchrun or iris.launch, and call iris.tune there",
        )
    program = call.trace(*args, **kwargs).program
    name = program.options.name
    if program.graph.writes:
        raise UnsupportedError(
            f"{name}: tune calls the program many times, and it writes to its arguments",
            help="tune a function that returns the new values instead",
        )
    if program.choose.lowering == "torch":
        raise UnsupportedError(
            f"{name}: its stages run as torch ops, which have one way",
            help='tune where there is a GPU, or a program with lowering="triton"',
        )
    ctx, group = current(), group_of(program.mesh)
    assert group is not None
    times = tuned.of_group(ctx, group).times
    found: tuned.Times = {}
    ways = {choice.stage: choice.ways for choice in program.choices.values() if choice.ways}
    for stage, algorithms in ways.items():
        found[stage] = {}
        for algorithm in algorithms:
            times[stage] = {algorithm: 0.0}  # the only one there is
            fresh = function.fresh()
            variant = SpmdMethod(fresh, call._instance) if isinstance(call, SpmdMethod) else fresh
            found[stage][algorithm] = _slowest(group, partial(variant, *args, **kwargs))
        times[stage] = found[stage]
    tuned.save(ctx, group)
    function.forget()
    return Tuning(name, found)


def _slowest(group: Group, call: Callable[[], Any]) -> float:
    """Microseconds of a call on the slowest rank, the median of many. Collective."""
    what = "iris.tune"
    for _ in range(3):  # traced, captured, replayed
        call()
    mine: Any = do_bench(
        call, barrier_fn=lambda: group.sync(what), n_warmup=2, n_repeat=CALLS, return_mode="median"
    )
    return 1e3 * float(max(group.exchange_object(what, mine)))
