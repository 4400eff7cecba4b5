"""The cost model: how long a stage takes by each of its algorithms, from shapes and a device
profile.

``product = max(operations / rate / fill, bytes / bandwidth)``, where ``fill`` is the part of the
last wave of tiles that has work; ``sent = bytes over the link / link + latency``. Fused, the two
overlap and the shorter hides but for its start; unfused, they follow each other with a launch and a
meeting more. All sizes are those of the first rank's shard, so every rank predicts the same.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from iris.graph.ops.rules import axes_of, group_size
from iris.graph.types import DTYPES, Mesh, TensorType
from iris.lower.stages import Match

TILE = (128, 256)


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
    meeting: float = 4e-6  # a device barrier as a kernel of its own

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
    """Microseconds of a matched stage by each algorithm, ``fused`` and ``unfused``."""

    def shape(name: str) -> tuple[int, ...]:
        return types[name].local_shape(mesh, mesh.origin)

    item = DTYPES[types[match.products[0].left].dtype]
    product, rows, columns = 0.0, 0, 0
    for step in match.products:
        (rows, inner), columns = shape(step.left), shape(step.right)[1]
        product += _product(rows, inner, columns, item, profile)
    members = group_size(mesh, axes_of(match.collective.kwargs["axis"]))  # type: ignore[arg-type]
    sent = _sent(match, math.prod(shape(match.collective.uses[0])) * item, members, profile)
    first = min(product, sent) / members  # what cannot be hidden: until the first part has come
    fused = max(product, sent) + first + profile.latency + profile.launch
    unfused = product + sent + len(match.products) * profile.launch + 2 * profile.meeting
    return {"fused": 1e6 * fused, "unfused": 1e6 * unfused}


def _product(rows: int, inner: int, columns: int, item: int, profile: Profile) -> float:
    tiles = -(-rows // TILE[0]) * -(-columns // TILE[1])
    waves = -(-tiles // profile.units)
    fill = min(1.0, tiles / max(1, waves * profile.units))
    # Few tiles are cut along the contracted dim, so a wave is rarely emptier than half.
    rate = profile.rates[max(1, min(4, item))] * max(fill, 0.5)
    moved = (rows * inner + inner * columns + rows * columns) * item
    return max(2.0 * rows * inner * columns / rate, moved / profile.bandwidth)


def _sent(match: Match, nbytes: int, members: int, profile: Profile) -> float:
    """Seconds that this rank's part of the collective takes; ``nbytes`` is its operand."""
    if members == 1:
        return 0.0
    others = members - 1
    if match.stage in ("all_gather_matmul", "matmul_all_gather"):
        traffic: float = nbytes * others
    elif match.stage == "matmul_reduce_scatter":
        traffic = nbytes * others / members
    else:
        traffic = min(nbytes * others, 2 * nbytes * others / members)
    return traffic / profile.link + profile.latency
