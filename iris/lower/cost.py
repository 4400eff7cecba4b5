"""The cost model: how long a stage takes by each of its algorithms, from shapes and a device
profile.

A product by the library takes ``max(operations / rate / fill, bytes / bandwidth)``, where ``fill``
is the part of the last wave of tiles that has work; by our kernels, the steps of its longest
program. What travels takes ``bytes sent / link``, and the units that compute load and store it too:
``bytes accessed / (moves * units)``. Fused, work is both and hides the link but for its start;
unfused, they follow each other with a launch more, and between them a rank waits for the slowest
product. All sizes are those of the first rank's shard, so every rank predicts the same.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from iris.graph.ops.rules import axes_of, group_size
from iris.graph.types import DTYPES, Mesh, TensorType
from iris.lower.kernels.schedule import FEW_ROWS, last_wave
from iris.lower.stages import Match

# Until a product of the library has its first operands: what it takes on an H200 over its bytes.
START = 2.5e-6
# As `default_config` has them.
TILE, FEW_TILE = (128, 256), (64, 128)


@dataclass(frozen=True)
class Profile:
    """What one rank has of a device: units, rates in FLOP/s by bytes of an element, bytes/s,
    seconds.
    """

    name: str
    units: int
    rates: Mapping[int, float]
    bandwidth: float
    link: float
    latency: float = 3e-6  # a flag to a peer and back into a waiting kernel
    launch: float = 2e-6  # one more kernel in a CUDA graph
    request: float = 5e-5  # until the copy engine does what a kernel asks for
    moves: float = 2.7e10  # bytes/s that a unit loads and stores in our kernels
    meet: float = 5e-6  # a kernel that meets peers and has nothing else to do
    straggle: float = 0.0  # waves of the library's tiles until the slowest rank has its product

    def shared(self, ranks: int, units: int) -> "Profile":
        """What is left to one of ``ranks`` ranks on this device, which may use ``units`` of it.

        Peers' memory is then this device's own, which all ranks read and write at once. A launch
        now and then lacks some units, and of several ranks most often one does: its product takes a
        wave more, and the others wait. ``meet`` and ``straggle`` are fitted to stages of an H200 at
        W=4, where ``python -m iris.bench profile`` has not measured them.
        """
        if ranks == 1:
            return self
        part = units / self.units
        return replace(
            self,
            units=units,
            rates={size: rate * part for size, rate in self.rates.items()},
            bandwidth=self.bandwidth / ranks,
            link=self.bandwidth / 2 / ranks,
            launch=1e-6,
            meet=8e-6,
            straggle=1.3,
        )


# Dense rates and memory bandwidth: the vendors' data sheets, with 0.8 of them taken as reachable;
# links: one direction.
PROFILES = (
    Profile("H200", 132, {1: 1.58e15, 2: 7.9e14, 4: 5.4e13}, 4.3e12, 3.6e11),
    Profile("H100", 132, {1: 1.58e15, 2: 7.9e14, 4: 5.4e13}, 2.7e12, 3.6e11),
    Profile("A100", 108, {1: 4.9e14, 2: 2.5e14, 4: 1.6e13}, 1.6e12, 2.4e11),
    Profile("MI300X", 304, {1: 2.0e15, 2: 1.0e15, 4: 1.3e14}, 4.2e12, 3.6e11),
)
ANY = replace(PROFILES[1], name="unknown, taken as H100")


def profile_of(name: str) -> Profile:
    """The profile of a device by its name, as the driver gives it."""
    return next((profile for profile in PROFILES if profile.name in name), ANY)


def predict(
    match: Match, types: Mapping[str, TensorType], mesh: Mesh, profile: Profile
) -> dict[str, float]:
    """Microseconds of a matched stage by each algorithm: see `iris.lower.choices.ALGORITHMS`."""
    types = {**types, **{value.name: value.type for value in match.values}}

    def shape(name: str) -> tuple[int, ...]:
        return types[name].local_shape(mesh, mesh.origin)

    library = kernel = slowest = 0.0
    for step in match.products:
        (rows, inner), columns = shape(step.left), shape(step.right)[1]
        item = DTYPES[types[step.left].dtype]
        library += _library_product(rows, inner, columns, item, profile)
        kernel += _kernel_product(rows, inner, columns, item, profile)
        slowest = max(slowest, profile.straggle * wave(rows, inner, item, profile))
    operand = types[match.collective.uses[0]]
    nbytes = math.prod(shape(match.collective.uses[0])) * DTYPES[operand.dtype]
    members = group_size(mesh, axes_of(match.collective.kwargs["axis"]))  # type: ignore[arg-type]
    ways = WAYS[match.stage]
    unit, moves = nbytes / members, min(profile.moves * profile.units, profile.bandwidth)
    links = {way: TRAFFIC[way].sent(members) * unit / profile.link for way in ways}
    # A second step begins once all of this rank's units are through with the first.
    steps = {way: 2 * profile.latency * (way == "two") for way in ways}
    times = {}
    for way, link in links.items():
        work = kernel + TRAFFIC[way].fused(members) * unit / moves
        # What cannot be hidden: until the first part has come.
        times[way] = max(work, link) + min(work, link) / members + steps[way] + profile.meet
    launches, tail = len(match.products), 0.0
    if match.stage == "all_reduce_norm" and match.norm and match.late:  # node by node
        more = len(match.norm.nodes) + len(match.late.nodes)
        launches += more
        tail = more * 2 * nbytes / profile.bandwidth
    alone = min(
        max(TRAFFIC[way].alone(members) * unit / moves, links[way]) + steps[way] for way in ways
    )
    unfused = library + slowest + alone + profile.meet + launches * profile.launch + tail
    names = (
        {"one": "one-shot", "two": "two-shot"} if len(ways) > 1 else dict.fromkeys(ways, "fused")
    )
    found = {names[way]: time for way, time in times.items()} | {"unfused": unfused}
    if match.stage == "all_gather_matmul":  # all units begin with this rank's part of the product
        asked = links["all"] + profile.request
        found["copy engine"] = max(kernel, asked) + profile.meet
    return {way: 1e6 * time for way, time in found.items()}


def wave(rows: int, inner: int, item: int, profile: Profile) -> float:
    """Seconds in which every unit computes one of the library's tiles."""
    high, wide = FEW_TILE if rows <= FEW_ROWS else TILE
    rate = profile.rates[max(1, min(4, item))] / profile.units
    return 2.0 * high * wide * inner / rate


def _library_product(rows: int, inner: int, columns: int, item: int, profile: Profile) -> float:
    """Seconds of a product by the vendor's library."""
    tiles = -(-rows // TILE[0]) * -(-columns // TILE[1])
    waves = -(-tiles // profile.units)
    fill = min(1.0, tiles / max(1, waves * profile.units))
    # Few tiles are cut along the contracted dim, so a wave is rarely emptier than half.
    rate = profile.rates[max(1, min(4, item))] * max(fill, 0.5)
    moved = (rows * inner + inner * columns + rows * columns) * item
    return START + max(2.0 * rows * inner * columns / rate, moved / profile.bandwidth)


def _kernel_product(rows: int, inner: int, columns: int, item: int, profile: Profile) -> float:
    """Seconds of a product by our kernels, as they share out and cut its tiles."""
    (high, wide), deep = (FEW_TILE, 256 // item) if rows <= FEW_ROWS else (TILE, 128 // item)
    tiles, depth = -(-rows // high) * -(-columns // wide), max(1, -(-inner // deep))
    waves, left = divmod(tiles, profile.units)
    steps = waves * depth + last_wave(left, depth, profile.units)
    step = 2.0 * high * wide * deep / profile.rates[max(1, min(4, item))] * profile.units
    if rows <= high:  # else units share what they read of the weight
        step = max(step, wide * deep * item * profile.units / profile.bandwidth)
    moved = (rows * inner + inner * columns + rows * columns) * item
    return max(steps * step, moved / profile.bandwidth)


# The ways in which a stage's parts travel.
WAYS = {
    "all_gather_matmul": ("all",),
    "matmul_all_gather": ("part",),
    "matmul_reduce_scatter": ("own",),
    "matmul_all_reduce": ("one", "two"),
    "all_reduce_norm": ("one",),
}


class Traffic(NamedTuple):
    """What a rank of ``w`` sends to others, and what its units load and store in a fused kernel and
    in a collective alone; counted in w-ths of the collective's operand.
    """

    sent: Callable[[int], float]
    fused: Callable[[int], float]
    alone: Callable[[int], float]


TRAFFIC = {
    # Loaded and stored to all; alone, published, and all of it loaded and stored.
    "all": Traffic(lambda w: w * (w - 1), lambda w: w * w, lambda w: 2 * w + 2 * w * w),
    # Stored to all, then loaded and stored.
    "part": Traffic(lambda w: w * (w - 1), lambda w: 3 * w * w, lambda w: 2 * w + 2 * w * w),
    # Stored, loaded, and a sum of w-th stored; alone, also published.
    "own": Traffic(lambda w: w - 1, lambda w: 2 * w + 1, lambda w: 3 * w + 1),
    "one": Traffic(lambda w: w * (w - 1), lambda w: 2 * w * w + w, lambda w: w * w + 3 * w),
    # As "own", then each sum stored to all, loaded and stored.
    "two": Traffic(lambda w: 2 * (w - 1), lambda w: 5 * w, lambda w: 5 * w + 1),
}
