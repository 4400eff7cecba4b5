"""Arguments that share memory, writes in place, and results that are arguments; one rank."""

import pytest
import torch

import iris

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def ctx():
    with iris.iris(1 << 20) as context:
        yield context


def test_aliases_are_part_of_the_signature():
    # pytorch/pytorch#139789
    @iris.spmd
    def f(x, y):
        x.mul_(2)
        return x + y

    x, y = torch.ones(4), torch.ones(4)
    assert f(x, y).tolist() == [3.0] * 4
    for _ in range(3):
        base = torch.ones(8)
        assert f(base[:4], base[2:6]).tolist() == [4, 4, 3, 3]
        assert base.tolist() == [2, 2, 2, 2, 1, 1, 1, 1]
    assert f(torch.ones(4), torch.ones(4)).tolist() == [3.0] * 4


def test_two_rows_of_one_base_are_written_and_read():
    # pytorch/pytorch#153389
    @iris.spmd
    def f(a, b):
        a.add_(1)
        b.mul_(3)
        return a + b

    for _ in range(3):
        base = torch.ones(2, 3)
        assert f(base[0], base[1]).tolist() == [5.0] * 3
        assert base.tolist() == [[2.0] * 3, [3.0] * 3]


def test_same_tensor_twice():
    # jax-ml/jax#9635
    @iris.spmd
    def f(x, y):
        return x * y

    x, y = torch.full((2,), 3.0), torch.full((2,), 4.0)
    assert f(x, y).tolist() == [12, 12]
    assert f(x, x).tolist() == [9, 9]
    assert f(y, x).tolist() == [12, 12]


def test_arguments_come_back_beside_some_that_share_memory():
    @iris.spmd
    def f(a, b, c, d):
        a += 1
        return d, b * 2, c

    for step in range(3):
        base, c, d = torch.arange(6.0) + step, torch.zeros(1), torch.ones(1)
        found = f(base[:4], base[2:], c, d)
        assert found[0] is d
        assert found[1].tolist() == [2 * step + n for n in (6, 8, 8, 10)]
        assert found[2] is c


def test_write_through_an_expanded_view():
    # pytorch/pytorch#152425
    @iris.spmd
    def f(x):
        a = x.expand(2)
        a[-1] = 3
        return a

    for _ in range(3):
        x = torch.ones(1)
        assert f(x).tolist() == [3, 3]
        assert x.tolist() == [3]


def test_in_place_writes_reach_the_caller():
    @iris.spmd
    def f(x):
        x[1:].add_(5)
        x.relu_()
        return x

    for _ in range(3):
        x = torch.tensor([-1.0, -1.0, -9.0])
        assert f(x) is x
        assert x.tolist() == [0, 4, 0]


@pytest.mark.parametrize(
    "write",
    [
        lambda outside, x: outside.add_(x),
        lambda outside, x: outside.add_(1),
        lambda outside, x: torch._foreach_add_([outside], 1.0),
        lambda outside, x: torch.add(x, 1, out=outside),
    ],
    ids=["by an argument", "by a number", "in a list", "out"],
)
def test_writing_to_an_outside_tensor_is_refused(write):
    outside = torch.zeros(2)

    @iris.spmd
    def f(x):
        write(outside, x)
        return x

    with pytest.raises(iris.TraceError, match="changes in place a tensor that is not an argument"):
        f(torch.ones(2))
    assert outside.tolist() == [0, 0]


def test_results_as_in_eager():
    # pytorch/pytorch#154839
    @iris.spmd
    def f(x, unused, flag=True):
        y = x + 1
        return x, y, y, None, 3, flag

    for _ in range(3):
        x = torch.ones(2)
        same, y, again, nothing, three, flag = f(x, torch.zeros(1))
        assert same is x
        assert y.tolist() == again.tolist() == [2, 2]
        assert (nothing, three, flag) == (None, 3, True)


def test_feeding_results_back():
    # pytorch/pytorch#152887
    @iris.spmd
    def f(x):
        return x + 1

    @iris.spmd
    def g(x):
        return x * 2

    x = torch.zeros(2)
    assert f(f(x)).tolist() == [2, 2]
    y = f(x)
    z = f(y)
    assert y.tolist() == [1, 1]
    assert z.tolist() == [2, 2]
    assert g(f(x)).tolist() == [2, 2]
