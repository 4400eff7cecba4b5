"""The cost model: how long a stage takes by each of its algorithms, from shapes and a device
profile.

A product by the library takes ``max(operations / rate / fill, bytes / bandwidth)``, where ``fill``
is the part of the last wave of tiles that has work; by our kernels, the steps of its longest
program. ``sent = bytes over the link / link + latency``. Fused, the two overlap and the shorter
hides but for its start; unfused, they follow each other with a launch more. All sizes are those of
the first rank's shard, so every rank predicts the same.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from iris.graph.ops.rules import axes_of, group_size
from iris.graph.types import DTYPES, Mesh, TensorType
from iris.lower.kernels.schedule import last_wave
from iris.lower.stages import Match

# What a kernel that meets peers takes beside its work where ranks share a GPU: fitted to sums of
# one row on an H200 at W=4, fused and not.
SHARED_LAUNCH = 6e-6
# As `default_config` has them.
TILE, FEW_TILE, FEW_ROWS = (128, 256), (64, 128), 64


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

    def shared(self, ranks: int, units: int) -> "Profile":
        """What is left to one of ``ranks`` ranks on this device, which may use ``units`` of it."""
        if ranks == 1:
            return self
        part = units / self.units
        rates = {size: rate * part for size, rate in self.rates.items()}
        # Peers' memory is then this device's own, which all ranks read and write at once.
        return replace(
            self,
            units=units,
            rates=rates,
            bandwidth=self.bandwidth / ranks,
            link=self.bandwidth / 2 / ranks,
            launch=SHARED_LAUNCH,
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

    library = kernel = 0.0
    for step in match.products:
        (rows, inner), columns = shape(step.left), shape(step.right)[1]
        size = (rows, inner, columns, DTYPES[types[step.left].dtype])
        library += _library_product(*size, profile)
        kernel += _kernel_product(*size, profile)
    operand = types[match.collective.uses[0]]
    nbytes = math.prod(shape(match.collective.uses[0])) * DTYPES[operand.dtype]
    members = group_size(mesh, axes_of(match.collective.kwargs["axis"]))  # type: ignore[arg-type]
    ways = {way: _sent(way, nbytes, members, profile) for way in WAYS[match.stage]}
    # What cannot be hidden: until the first part has come.
    times = {
        way: max(kernel, sent) + min(kernel, sent) / members + profile.launch
        for way, sent in ways.items()
    }
    launches = len(match.products) + 1
    tail = 0.0
    if match.stage == "all_reduce_norm" and match.norm and match.late:  # node by node
        launches += len(match.norm.nodes) + len(match.late.nodes)
        tail = (launches - 1) * 2 * nbytes / profile.bandwidth
    unfused = library + min(ways.values()) + launches * profile.launch + tail
    names = (
        {"one": "one-shot", "two": "two-shot"} if len(ways) > 1 else dict.fromkeys(ways, "fused")
    )
    found = {names[way]: time for way, time in times.items()} | {"unfused": unfused}
    if match.stage == "all_gather_matmul":  # all units begin with this rank's part of the product
        found["copy engine"] = max(kernel, ways["all"] + profile.request) + profile.launch
    return {way: 1e6 * time for way, time in found.items()}


def _library_product(rows: int, inner: int, columns: int, item: int, profile: Profile) -> float:
    """Seconds of a product by the vendor's library."""
    tiles = -(-rows // TILE[0]) * -(-columns // TILE[1])
    waves = -(-tiles // profile.units)
    fill = min(1.0, tiles / max(1, waves * profile.units))
    # Few tiles are cut along the contracted dim, so a wave is rarely emptier than half.
    rate = profile.rates[max(1, min(4, item))] * max(fill, 0.5)
    moved = (rows * inner + inner * columns + rows * columns) * item
    return max(2.0 * rows * inner * columns / rate, moved / profile.bandwidth)


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
    "matmul_all_gather": ("all",),
    "matmul_reduce_scatter": ("own",),
    "matmul_all_reduce": ("one", "two"),
    "all_reduce_norm": ("one",),
}


def _sent(way: str, nbytes: int, members: int, profile: Profile) -> float:
    """Seconds that this rank's part of the collective takes; ``nbytes`` is its operand."""
    others = members - 1
    traffic = {
        "all": nbytes * others,
        "own": nbytes * others / members,
        "one": nbytes * others,
        "two": 2 * nbytes * others / members,
    }[way]
    hops = min(others, 2 if way == "two" else 1)
    return traffic / profile.link + hops * profile.latency
