"""The schedule of a product: every step of every tile exactly once, for any shape."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings, strategies as st

from iris.lower.kernels.host import Turns
from iris.lower.kernels.schedule import make_schedule, tile_order

pytestmark = pytest.mark.cpu


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3),
    st.integers(1, 40),
    st.integers(1, 30),
    st.integers(1, 8),
    st.booleans(),
)
@settings(deadline=None, max_examples=100)
def test_every_step_is_computed_once(grids, depth, programs, group, cut):
    orders = [tile_order(rows, columns, group, rows // 2) for rows, columns in grids]
    schedule = make_schedule(orders, depth, programs, cut)
    for (rows, columns), (first, edge, end) in zip(grids, schedule.heads, strict=True):
        done = torch.zeros(max(1, rows), max(1, columns), depth, dtype=torch.int32)
        for number, segment in enumerate(schedule.segments[first:end], first):
            assert segment.count > 0
            assert (segment.parts == 1) == (number < edge)
            done[segment.row, segment.column, segment.first :][: segment.count] += 1
        assert (done == (rows * columns > 0)).all()


@given(st.integers(1, 300), st.integers(1, 60), st.integers(1, 40))
@settings(deadline=None, max_examples=100)
def test_parts_of_a_tile_have_places_of_their_own(tiles, depth, programs):
    schedule = make_schedule([tile_order(tiles, 1, 8, 0)], depth, programs)
    parts = [segment for segment in schedule.segments if segment.parts > 1]
    places = {segment.space + segment.part for segment in parts}
    assert places == set(range(schedule.parts))
    assert len(places) == len(parts)
    assert len(parts) <= programs  # each program has one at most
    assert {segment.cut for segment in parts} == set(range(schedule.cuts))


@dataclass(frozen=True)
class Member:
    """A place in a group of three."""

    index: int
    size: int = 3
    ranks: tuple[int, ...] = (0, 1, 2)

    def sync(self, what: str) -> int:
        raise AssertionError("sharing out needs no meeting")


def test_each_kernel_is_compiled_by_one_member():
    asked = ["gather", "scatter", "gather", "reduce", "scatter", "product", "gather", "norm"]
    compiled = []
    for index in range(3):
        turns = Turns(Member(index))
        compiled.append([name for name in asked if turns.mine(name)])
    assert compiled == [["gather", "product"], ["scatter", "norm"], ["reduce"]]
