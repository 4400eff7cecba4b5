"""A call is taken for one of the last only where their cache keys are the same."""

import contextlib
import gc
import random
import weakref
from dataclasses import dataclass, replace

import pytest
import torch

import iris

pytestmark = pytest.mark.cpu

SCALE = 2.0


@pytest.fixture(autouse=True)
def ctx():
    with iris.iris(1 << 20) as context:
        yield context


def twice(x):
    return 2 * x


HELPER = twice


@iris.spmd
def plain(tree, flag, *, gain=1.0):
    total = HELPER(tree["a"]) * SCALE * gain
    return total + sum(tree["b"]) if flag else total


@iris.spmd
def writing(tree, flag, *, gain=1.0):
    tree["a"].add_(gain)
    return tree["a"] * SCALE + (sum(tree["b"]) if flag else 0)


@dataclass(frozen=True)
class Kind:
    """Metadata of one tensor."""

    shape: tuple[int, ...] = (2, 2)
    dtype: torch.dtype = torch.float32
    transposed: bool = False
    requires_grad: bool = False
    parameter: bool = False

    def make(self):
        x = torch.ones(self.shape, dtype=self.dtype)
        x = x.T if self.transposed else x
        if self.parameter:
            return torch.nn.Parameter(x, self.requires_grad)
        return x.requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class Call:
    """One call and what surrounds it. ``shared`` makes ``b[0]`` a view of ``a``'s memory."""

    a: Kind = Kind()
    b: tuple[Kind, ...] = (Kind(),)
    names: tuple[str, ...] = ("a", "b")
    flag: object = True
    gain: object = 1.0
    scale: object = 2.0
    shared: bool = False
    mode: type = torch.no_grad
    default: torch.dtype = torch.float32
    cast: bool = False

    @contextlib.contextmanager
    def surroundings(self):
        global SCALE
        SCALE = self.scale
        torch.set_default_dtype(self.default)
        try:
            with self.mode(), torch.autocast("cpu", enabled=self.cast):
                yield
        finally:
            SCALE = 2.0
            torch.set_default_dtype(torch.float32)

    def arguments(self):
        a, b = self.a.make(), [kind.make() for kind in self.b]
        if self.shared and b:
            b[0] = a.detach()[:]
        leaves = {"a": a, "b": b}
        return ({name: leaves[name] for name in self.names}, self.flag), {"gain": self.gain}


FIELDS = {
    "a": [
        Kind(shape, dtype, transposed, grad, parameter)
        for shape in [(2, 2), (2, 1), (1, 2)]
        for dtype in (torch.float32, torch.float64)
        for transposed in (False, True)
        for grad in (False, True)
        for parameter in (False, True)
    ],
    "b": [(), (Kind(),), (Kind((1, 2)),), (Kind(), Kind(dtype=torch.float64))],
    "names": [("a", "b"), ("b", "a")],
    "flag": [True, False, 1, 0, 1.0, "yes", None],
    "gain": [1.0, 0.0, -0.0, float("nan"), 1, True],
    "scale": [2.0, 2, 3.0, -0.0, 0.0],
    "shared": [False, True],
    "mode": [torch.no_grad, torch.inference_mode],
    "default": [torch.float32, torch.float64],
    "cast": [False, True],
}


def key_and_hit(function, call):
    """The full cache key of a call, and whether it is taken for one of the last."""
    with call.surroundings():
        args, kwargs = call.arguments()
        binder, state = function._bindings(None)
        bound = binder.bind(args, kwargs)
        hits = [hit.key for hit in state.hits if hit.fits(bound, None)]
        return function._key(None, bound, state), hits


def run(function, call):
    with call.surroundings():
        args, kwargs = call.arguments()
        return function(*args, **kwargs)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("function", [plain, writing])
def test_only_calls_with_the_same_key_hit(function, seed):
    """Every change of one part, and of a few at once, of some random calls."""
    draw = random.Random(seed)
    bases = [Call(**{name: draw.choice(values) for name, values in FIELDS.items()})]
    bases.append(replace(bases[0], flag=False, gain=draw.choice(FIELDS["gain"])))
    for call in bases:
        run(function, call)
        _, hits = key_and_hit(function, call)
        assert hits or call.shared  # the guards do not vouch for one tensor given twice
    near = [
        replace(call, **{name: value})
        for call in bases
        for name in FIELDS
        for value in FIELDS[name]
    ]
    further = [
        replace(call, **{n: draw.choice(FIELDS[n]) for n in draw.sample([*FIELDS], 2)})
        for call in near
    ]
    for call in near + further:
        key, hits = key_and_hit(function, call)
        assert all(hit == key for hit in hits), call


CHANGES = {
    "shape": {"a": Kind((2, 1))},
    "dtype": {"a": Kind(dtype=torch.float64)},
    "stride": {"a": Kind(transposed=True)},
    "requires_grad": {"a": Kind(requires_grad=True)},
    "structure": {"b": (Kind(), Kind())},
    "static": {"flag": 1},
    "sign of zero": {"gain": -0.0},
    "global": {"scale": 2},
    "default dtype": {"default": torch.float64},
    "autocast": {"cast": True},
    "grad mode": {"mode": torch.enable_grad},
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_part_of_the_key_is_looked_at(name):
    base = Call(gain=0.0)
    run(plain, base)
    assert key_and_hit(plain, base)[1]
    changed = Call(**{"gain": 0.0, **CHANGES[name]})
    assert not key_and_hit(plain, changed)[1]


def test_aliases_are_looked_at_where_the_program_writes():
    run(writing, Call())
    assert key_and_hit(writing, Call())[1]
    assert not key_and_hit(writing, Call(shared=True))[1]


def test_a_replaced_helper_a_context_and_an_attribute_are_looked_at():
    global HELPER
    x = torch.ones(2)

    class Gain:
        factor = 3.0

        @iris.spmd
        def scaled(self, x):
            return HELPER(x) * self.factor

    gain = Gain()
    assert [gain.scaled(x)[0].item() for _ in range(3)] == [6] * 3
    HELPER = lambda x: 5 * x  # noqa: E731
    try:
        assert [gain.scaled(x)[0].item() for _ in range(3)] == [15] * 3
    finally:
        HELPER = twice
    assert gain.scaled(x)[0].item() == 6
    gain.factor = 2.0
    assert [gain.scaled(x)[0].item() for _ in range(3)] == [4] * 3
    gone = weakref.ref(gain)
    del gain
    gc.collect()
    assert gone() is None


def test_metadata_changed_in_place_is_looked_at():
    @iris.spmd
    def total(x):
        return x.sum(0)

    x = torch.arange(6.0).view(2, 3)
    assert total(x).tolist() == [3, 5, 7]
    assert total(x).tolist() == [3, 5, 7]
    x.t_()
    assert total(x).tolist() == [3, 12]
    x.data = torch.ones(4, 1)
    assert total(x).tolist() == [4]


def test_hits_go_with_the_programs_that_are_dropped(monkeypatch):
    from iris.spmd import decorator

    monkeypatch.setattr(decorator, "CACHED_PROGRAMS", 2)

    @iris.spmd
    def double(x):
        return 2 * x

    for n in (1, 2, 3, 2, 4, 2, 1, 2):
        assert double(torch.ones(n)).tolist() == [2] * n
        state = double._state
        assert len(state.programs) <= 2
        assert {hit.key for hit in state.hits} <= set(state.programs)
    assert {tuple(program.leaves[0].value.shape) for program in state.programs.values()} == {
        (1,),
        (2,),
    }


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.flag, self.extra = 1.0, False, None
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight  # tied
        self.register_buffer("shift", torch.zeros(2))
        self.notes, self.act = [], torch.relu
        self.layers[1].act = lambda x: x

    @iris.spmd
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * self.scale + self.shift


MODULE_CHANGES = {
    "plain attribute": lambda net: setattr(net, "scale", 2.0),
    "its type": lambda net: setattr(net, "scale", True),
    "sign of zero": lambda net: (setattr(net, "scale", 0.0), setattr(net, "scale", -0.0)),
    "of a child": lambda net: setattr(net.layers[1], "in_features", 7),
    "new attribute": lambda net: setattr(net.layers[1], "more", 1),
    "attribute gone": lambda net: delattr(net, "flag"),
    "attribute becomes plain": lambda net: setattr(net, "notes", 3),
    "child": lambda net: setattr(net, "extra", torch.nn.Linear(2, 2)),
    "other child": lambda net: net.layers.__setitem__(1, torch.nn.Linear(2, 2)),
    "children swapped": lambda net: setattr(
        net.layers,
        "_modules",
        dict(zip("012", reversed(net.layers._modules.values()), strict=True)),
    ),
    "function": lambda net: setattr(net, "act", torch.tanh),
    "other function": lambda net: setattr(net.layers[1], "act", twice),
    "hook of a child": lambda net: net.layers[1].register_forward_hook(lambda *_: None),
    "hook before a child": lambda net: net.layers[1].register_forward_pre_hook(lambda *_: None),
    "mode": lambda net: net.eval(),
    "mode of a child": lambda net: net.layers[1].eval(),
    "parameter": lambda net: setattr(net.layers[1], "bias", torch.nn.Parameter(torch.ones(2))),
    "no parameter": lambda net: setattr(net.layers[1], "bias", None),
    "buffer": lambda net: setattr(net, "shift", torch.ones(2)),
    "requires_grad": lambda net: net.layers[1].requires_grad_(False),
    "dtype": lambda net: net.double(),
    "data of another shape": lambda net: setattr(net.layers[1].weight, "data", torch.ones(1, 2)),
    "class of a child": lambda net: setattr(net.layers[1], "__class__", torch.nn.Identity),
}


@pytest.mark.parametrize("name", MODULE_CHANGES)
def test_a_changed_module_is_no_hit(name):
    net, same = Net(), Net()
    x = torch.ones(1, 2)

    def hits(module):
        binder, state = Net.__dict__["forward"]._bindings(module)
        bound = binder.bind((x,), {})
        key = Net.__dict__["forward"]._key(module, bound, state)
        found = [hit.key for hit in state.hits if hit.fits(bound, module)]
        assert all(hit == key for hit in found)
        return found

    with torch.no_grad():
        for module in (net, same):
            module(x)
            module.notes.append(len(module.notes))  # in place, and read by nobody
            assert hits(module)
        MODULE_CHANGES[name](net)
        assert not hits(net)
        assert hits(same)
    gone = weakref.ref(net)
    del net, module
    gc.collect()
    assert gone() is None
