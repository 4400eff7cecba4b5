"""What a trace sees and what the cache distinguishes: a world of one rank, no launcher."""

import collections
import dataclasses
import functools
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import nn

import iris

pytestmark = pytest.mark.cpu

SCALE = 2.0


@pytest.fixture(autouse=True)
def ctx():
    with iris.iris(1 << 20) as context:
        yield context


def times(fn, *args, n=3):
    """Call ``fn`` n times and return the last result."""
    return [fn(*args) for _ in range(n)][-1]


def traced(fn):
    """How many programs a decorated function holds."""
    return len(fn._state.programs)


class Config:
    scale = 1.0


def test_class_attribute_and_global_are_seen():
    # pytorch/pytorch#176851
    global SCALE

    @iris.spmd
    def f(x):
        return x * Config.scale * SCALE

    x = torch.tensor([4.0])
    assert times(f, x).item() == 8
    Config.scale = 10.0
    assert times(f, x).item() == 80
    SCALE = 1.0
    assert times(f, x).item() == 40
    Config.scale, SCALE = 1.0, 2.0
    assert times(f, x).item() == 8


def test_modules_from_outside_are_seen():
    layer, act, shift = nn.Linear(2, 2), nn.ReLU(), functools.partial(torch.add, 1.0)

    @iris.spmd
    def f(x):
        return shift(act(layer(x)))

    def check(programs):
        with torch.no_grad():
            assert torch.equal(times(f, x), shift(act(layer(x))))
        assert traced(f) == programs

    x = torch.tensor([[4.0, -3.0]])
    check(1)
    with torch.no_grad():
        layer.bias.add_(5)
    check(1)
    layer.bias = nn.Parameter(torch.ones(2))
    check(2)
    layer = nn.Linear(2, 2, bias=False)
    check(3)
    act = nn.Dropout(0.0)
    check(4)
    act.eval()
    check(5)
    shift = functools.partial(torch.add, 2.0)
    check(6)


@dataclasses.dataclass
class Settings:
    power: int
    name: str = "s"

    def __hash__(self):
        return 7


def test_mutable_static_is_compared_by_value():
    # jax-ml/jax#13992
    @iris.spmd
    def f(x, settings):
        return x**settings.power

    settings = Settings(2)
    x = torch.tensor(3.0)
    assert times(f, x, settings) == 9
    settings.power = 0
    assert times(f, x, settings) == 1
    assert f(x, Settings(2)) == 9


def test_static_that_cannot_be_compared_is_refused():
    @iris.spmd
    def f(x, table):
        return x

    with pytest.raises(iris.SpecError) as caught:
        f(torch.ones(1), np.ones(3))
    assert str(caught.value) == (
        "f: table: an argument of type ndarray cannot be compared by value\n"
        "help: pass tensors, numbers, strings, containers or dataclasses of them, "
        "or close over the value"
    )


class Model:
    def __init__(self, scale, fn):
        self.scale, self.fn = scale, fn

    @iris.spmd
    def forward(self, x):
        return self.fn(x) * self.scale


def test_methods_and_instances():
    # jax-ml/jax#9023
    a, b = Model(2.0, torch.neg), Model(3.0, torch.abs)
    x = torch.tensor([1.0, -2.0])
    assert times(a.forward, x).tolist() == [-2.0, 4.0]
    assert times(b.forward, x).tolist() == [3.0, 6.0]
    a.fn = torch.abs
    assert times(a.forward, x).tolist() == [2.0, 4.0]
    a.scale = 5.0
    assert times(a.forward, x).tolist() == [5.0, 10.0]
    assert times(b.forward, x).tolist() == [3.0, 6.0]


LEAK = None
KEPT = []


def test_traced_tensor_left_outside_is_an_error():
    # jax-ml/jax#5206, pytorch/pytorch#114844
    @iris.spmd
    def to_global(x):
        global LEAK
        LEAK = x + 1
        return x

    @iris.spmd
    def to_list(x):
        KEPT.append(x * 2)
        return x

    class Module:
        @iris.spmd
        def forward(self, x):
            self.last = x * 3
            return x

    x = torch.ones(2)
    module = Module()
    for fn, where in ((to_global, "LEAK"), (to_list, "KEPT"), (module.forward, "self.last")):
        with pytest.raises(iris.TraceError) as caught:
            fn(x)
        name = getattr(fn, "__name__", "forward")
        assert str(caught.value) == (
            f"{name}: leaves a traced tensor in {where}: it has no value after the trace\n"
            "help: return the tensor from the function and store it outside"
        )
    assert LEAK is None
    assert KEPT == []
    assert not hasattr(module, "last")


def test_positional_keyword_and_default_are_one_call():
    # jax-ml/jax#523
    @iris.spmd
    def f(x, power=3, *, bias=0.0):
        return x**power + bias

    x = torch.tensor(2.0)
    assert f(x, 3) == f(x, power=3) == f(x) == f(power=3, x=x) == f(bias=0.0, x=x) == 8
    assert traced(f) == 1
    assert f(x, 11) == f(x, power=11) == 2048
    assert traced(f) == 2


def test_python_numbers_are_current():
    # pytorch/pytorch#194976
    @iris.spmd
    def f(x, s):
        return x.clamp(-s, s) * s

    x = torch.tensor([0.5, 5.0])
    for s in (1.0, 2.0, 3.0, 2.0, 1, True):
        assert f(x, s).tolist() == (x.clamp(-s, s) * s).tolist()


def test_one_number_that_keeps_changing_is_named_once():
    @iris.spmd
    def f(x, step):
        return x * step

    x = torch.ones(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(12):
            f(x, float(i + 1))
    assert len(caught) == 1
    assert "step keeps changing" in str(caught[0].message)


Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass
class Batch:
    tokens: torch.Tensor
    mask: torch.Tensor


pytree.register_dataclass(Batch)


def test_pytrees_keep_their_order():
    # jax-ml/jax#8419, deepspeedai/DeepSpeed#8488
    @iris.spmd
    def f(d, pair, batch, nested=None):
        parts = [v for values in d.values() for v in values]
        return {
            "z": torch.cat(parts),
            "a": [pair.first - pair.second, batch.tokens * batch.mask],
            "n": nested,
        }

    for i in range(3):
        t = [torch.tensor([float(i + k)]) for k in range(8)]
        out = f({"b": [t[0], t[1]], "a": [t[2], t[3]]}, Pair(t[4], t[5]), Batch(t[6], t[7]))
        assert list(out) == ["z", "a", "n"]
        assert out["z"].tolist() == [i, i + 1, i + 2, i + 3]
        assert out["a"][0].item() == -1
        assert out["a"][1].item() == (i + 6) * (i + 7)
        assert out["n"] is None


def test_trace_that_failed_leaves_nothing_behind():
    # jax-ml/jax#38460
    filled = []
    fail = [True]

    @iris.spmd
    def inner(x):
        return x * filled[0]

    @iris.spmd
    def outer(x):
        if fail[0]:
            raise ValueError("stop")
        return inner(x) + 1

    filled.append(2.0)
    with pytest.raises(ValueError, match="stop"):
        outer(torch.ones(1))
    fail[0] = False
    assert outer(torch.ones(1)).item() == 3
    filled[0] = 4.0
    assert outer(torch.ones(1)).item() == 5


def test_branches_on_shapes_and_on_values():
    # pytorch/pytorch#61733
    @iris.spmd
    def f(x):
        return x.sum(0) if x.shape[0] > 8 else x[0]

    for rows in (4, 16, 4):
        assert times(f, torch.ones(rows, 2)).tolist() == [16.0 if rows > 8 else 1.0] * 2

    @iris.spmd
    def g(x):
        if x.sum() > 0:
            return x
        return -x

    with pytest.raises(iris.TraceError) as caught:
        g(torch.ones(2))
    line = g.__wrapped__.__code__.co_firstlineno + 2
    assert str(caught.value) == (
        "g: Python asks for the value of a traced tensor (if, while, item(), int() or float())\n"
        f"  at test_spmd_tracing.py:{line}: if x.sum() > 0:\n"
        "help: use torch.where, or branch on shapes or on a plain Python argument"
    )


def test_tensors_closed_over_are_inputs():
    # pytorch/pytorch#50563
    c = torch.full((2,), 5.0)

    @iris.spmd
    def f(x):
        return c + x

    x = torch.ones(2)
    assert times(f, x).tolist() == [6, 6]
    c.fill_(0)
    assert times(f, x).tolist() == [1, 1]
    c = torch.full((2,), 7.0)
    assert times(f, x).tolist() == [8, 8]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_dtypes_as_in_eager(dtype):
    # jax-ml/jax#732, jax-ml/ml_dtypes#63
    def f(x):
        return x * 0.1, x + 1, x / 2, x.sum(), x * True

    x = torch.ones(20000, dtype=dtype)
    for got, expected in zip(times(iris.spmd(f), x), f(x), strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


def test_random_numbers_are_fresh_and_follow_the_seed():
    # pytorch/pytorch#84614
    @iris.spmd
    def f(x):
        return F.dropout(x, 0.5) + torch.rand(64)

    x = torch.ones(64)
    torch.manual_seed(3)
    first = [f(x) for _ in range(3)]
    torch.manual_seed(3)
    second = [f(x) for _ in range(3)]
    assert not torch.equal(first[0], first[1])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_nested_function_reads_a_value_of_the_outer_one():
    @iris.spmd
    def outer(x):
        y = x + 1

        @iris.spmd
        def inner(z):
            return z * y

        return inner(x) + inner(y)

    for step in range(3):
        x = torch.tensor([1.0, 5.0]) + step
        assert torch.equal(outer(x), x * (x + 1) + (x + 1) ** 2)


def test_nested_functions_are_part_of_the_program():
    weights = [torch.full((2, 2), float(i)) for i in range(3)]

    @iris.spmd
    def layer(x, w, *, scale=1.0):
        return {"y": x @ w * scale, "x": x}

    @iris.spmd
    def net(x, ws):
        for w in ws:
            out = layer(x, w, scale=0.5)
            assert out["x"] is x
            x = out["y"]
        return x

    x = torch.ones(2, 2)
    assert torch.equal(times(net, x, weights), x @ weights[0] @ weights[1] @ weights[2] / 8)
    assert traced(net) == 1
    assert str(net.trace(x, weights).graph).count("matmul(") == 3


def test_gradients_are_those_of_eager():
    weight = torch.arange(6.0).reshape(3, 2).requires_grad_()

    def inner(x):
        return torch.tanh(x) * x.detach()

    def f(x, y, n):
        with torch.no_grad():
            scale = x.sum() + weight.sum()
        z = nested(x @ weight) * scale if decorated else inner(x @ weight) * scale
        top = torch.topk(z, 1)
        return z[:, 0], z.t() + y, top.indices, n, y

    nested = iris.spmd(inner)
    program = iris.spmd(f)
    for seed in range(3):
        grads = []
        for decorated in (False, True):
            torch.manual_seed(seed)
            x, y = torch.randn(4, 3, requires_grad=True), torch.randn(2, 4, requires_grad=True)
            weight.grad = None
            first, second, indices, n, same = (program if decorated else f)(x, y, 7)
            assert (indices.requires_grad, n, same is y) == (False, 7, True)
            (first.sum() + (second * second).sum() + same.sum()).backward()
            grads += [(x.grad, y.grad, weight.grad)]
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other)
    assert traced(program) == 1
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            out = times(program, x, y, 7)
            assert not out[0].requires_grad
            torch.testing.assert_close(out[1], second.detach())


def test_calls_that_do_not_fit_the_signature():
    @iris.spmd
    def f(x, y):
        return x

    with pytest.raises(TypeError, match=r"^f\(\) missing a required argument: 'y'$"):
        f(torch.ones(1))


def test_without_a_context(ctx):
    ctx.close()
    with pytest.raises(iris.IrisError) as caught:
        iris.spmd(lambda x: x)(torch.ones(1))
    assert "iris.iris()" in str(caught.value)


def test_module_is_not_imported_twice():
    assert sys.modules["iris"] is iris
