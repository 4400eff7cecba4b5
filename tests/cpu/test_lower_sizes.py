"""Ops that return numbers among their tensors, as attention on GPUs does."""

import pytest
import torch

import iris
from iris.testing import assert_close

pytestmark = pytest.mark.cpu

LIBRARY = torch.library.Library("iris_test_sizes", "DEF")
LIBRARY.define("halves(Tensor x) -> (Tensor, Tensor, SymInt, Tensor)")


def halves(x, on_meta=False):
    """Two halves, a size, and a third result that only the meta form has."""
    left, right = x.chunk(2)
    return left.clone(), right.clone(), len(x), x.new_empty(0) if on_meta else None


LIBRARY.impl("halves", halves, "CPU")
LIBRARY.impl("halves", lambda x: halves(x, True), "Meta")


def test_tensors_are_told_from_sizes():
    iris.iris(1 << 20)

    @iris.spmd
    def swapped(x):
        left, right, _, _ = torch.ops.iris_test_sizes.halves(x)
        return torch.cat((right, left))

    for _ in range(3):
        x = torch.randn(6, 2)
        assert_close(swapped(x), torch.cat((x[3:], x[:3])))
