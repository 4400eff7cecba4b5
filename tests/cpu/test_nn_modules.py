"""Decorated modules: whatever their parameters, attributes and submodules are at a call is what
the call sees.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import iris
from iris import P
from iris.errors import SpecError, TraceError
from iris.spmd.modules import partition
from iris.testing import assert_close

pytestmark = pytest.mark.cpu

MODES = [torch.no_grad, torch.inference_mode]


class Block(nn.Module):
    """A module with everything that may change between calls."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.lora = None
        self.activation = F.relu
        self.double = False
        self.scale = 1.0

    def forward(self, x):
        y = self.activation(self.linear(x)) * self.scale
        if self.lora is not None:
            y = y + self.lora(x)
        if self.double:
            y = y * 2
        if self.training:
            y = y + 1
        return iris.all_reduce(y, "tp")


def plain(module, x):
    """``module(x)`` on one rank, without a program."""
    return Block.forward(module, x)


@pytest.fixture(params=["instance", "class", "forward"])
def block(request):
    """A decorated module on one rank, by each way to decorate it."""
    iris.iris(1 << 20)
    if request.param == "instance":
        return iris.spmd(Block())
    if request.param == "class":
        return iris.spmd(type("Block", (Block,), {}))()
    return type("Block", (Block,), {"forward": iris.spmd(Block.forward)})()


def check(module):
    """Three calls of ``module``, each with new input, in each mode: the plain module's values."""
    dtype = module.linear.weight.dtype
    for mode in MODES:
        for seed in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)
            with mode():
                assert_close(module(x), plain(module, x))


CHANGES = {
    "load_state_dict": lambda m: m.load_state_dict(
        {name: torch.randn_like(value) for name, value in m.state_dict().items()}
    ),
    "write in place": lambda m: m.linear.weight.data.fill_(0.5),
    "replace data": lambda m: setattr(m.linear.weight, "data", torch.ones(8, 8)),
    "replace submodule": lambda m: setattr(m, "linear", nn.Linear(8, 8)),
    "add submodule": lambda m: setattr(m, "lora", nn.Linear(8, 8)),
    "function": lambda m: setattr(m, "activation", torch.tanh),
    "hook": lambda m: m.linear.register_forward_hook(lambda _, args, y: y + args[0]),
    "hook before": lambda m: m.linear.register_forward_pre_hook(lambda _, args: args[0] * 2),
    "flag": lambda m: setattr(m, "double", True),
    "number": lambda m: setattr(m, "scale", 3.0),
    "eval": lambda m: m.eval(),
    "bfloat16": lambda m: m.to(torch.bfloat16),
    "half": lambda m: m.half(),
    "freeze": lambda m: m.requires_grad_(False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_after_the_first_call_is_seen(block, name):
    # pytorch/pytorch#120958, pytorch/pytorch#110797
    check(block)
    CHANGES[name](block)
    check(block)


def test_changes_one_after_the_other(block):
    names = ["eval", "add submodule", "bfloat16", "flag", "load_state_dict", "number"]
    for name in names:
        CHANGES[name](block)
        check(block)


@pytest.mark.parametrize("mode", [*MODES, torch.enable_grad], ids=["no grad", "inference", "grad"])
def test_the_first_call_may_be_in_any_mode(mode):
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Linear(4, 4).requires_grad_(False) for _ in range(2))

        def forward(self, x):
            return iris.all_reduce(self.a(x) * self.b(x), "tp")

    iris.iris(1 << 20)
    module = iris.spmd(Product())
    for _ in range(3):
        with mode():
            x = torch.randn(2, 4)
            assert_close(module(x), module.a(x) * module.b(x))


def test_same_dtype_again_is_not_traced_again():
    iris.iris(1 << 20)
    block = iris.spmd(Block())
    check(block)
    for change in (lambda m: m.eval(), lambda m: m.train(), lambda m: m.float()):
        change(block)
        check(block)
    assert len(block.forward.programs) == 2  # train and eval


def test_a_library_module_is_decorated_as_it_is():
    # pytorch/pytorch#104984
    iris.iris(1 << 20)
    stack = nn.Sequential(nn.Linear(8, 1), nn.Sigmoid()).eval()
    names, x = list(stack.state_dict()), torch.randn(4, 8)
    assert iris.spmd(stack) is stack
    assert list(stack.state_dict()) == names
    seen = []
    stack.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        before = stack(x)
        stack.load_state_dict({name: torch.zeros_like(v) for name, v in stack.state_dict().items()})
        assert_close(before, nn.Sequential.forward(stack, x) * 0 + before)
        assert_close(stack(x), torch.full((4, 1), 0.5))
    assert len(seen) == 2


class Remembers(nn.Module):
    """Keeps rows of its input in a cache, counts calls, and has running statistics."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("cache", torch.zeros(8, 4))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("read", torch.ones(4))

    def forward(self, x, at):
        self.calls += 1
        self.cache[at] = x
        return iris.all_reduce(self.norm(x) * self.read, "tp") + self.cache.sum(0) * self.calls


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["instance", "class"])
def test_buffers_are_written_to(mode, how):
    iris.iris(1 << 20)
    kind = iris.spmd(type("Remembers", (Remembers,), {})) if how == "class" else Remembers
    module, plain = kind(), Remembers()
    module = module if how == "class" else iris.spmd(module)
    held = {name: value.data_ptr() for name, value in module.named_buffers()}
    for change in ("none", "none", "load", "eval", "replace"):
        if change == "load":
            module.load_state_dict(plain.state_dict())
        elif change == "eval":
            module.eval(), plain.eval()
        elif change == "replace":
            module.cache, plain.cache = (torch.ones(8, 4) for _ in range(2))
            held.pop("cache")
        for seed in range(3):
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
            with mode():
                at = torch.tensor([seed, seed + 3])
                assert_close(module(x, at), Remembers.forward(plain, x, at))
        for name, value in module.named_buffers():
            assert_close(value, plain.get_buffer(name))
            assert held.get(name, value.data_ptr()) == value.data_ptr()


class Same(nn.Module):
    """A buffer with two names, which is also returned; and perhaps a view of it."""

    def __init__(self, view):
        super().__init__()
        self.register_buffer("first", torch.zeros(4))
        self.register_buffer("second", self.first)
        self.register_buffer("third", self.first[:2] if view else torch.ones(2))

    def forward(self, x):
        self.first += x
        return self.second * 2, self.first, x, self.third


def test_a_buffer_with_two_names_is_one():
    iris.iris(1 << 20)
    module, plain = iris.spmd(Same(False)), Same(False)
    for step in range(3):
        x = torch.arange(4.0) + step
        found, want = module(x), plain(x)
        assert all(map(torch.equal, found, want))
        assert found[1] is module.first is module.second
        assert found[2] is x
        assert found[3] is module.third


def test_a_buffer_that_is_part_of_another_is_refused():
    iris.iris(1 << 20)
    module = iris.spmd(Same(True))
    for _ in range(3):
        with pytest.raises(iris.UnsupportedError) as error:
            module(torch.ones(4))
        assert str(error.value) == (
            "Same: writes to a buffer, and third shares memory with another buffer or an argument\n"
            "help: hold that memory once, and view it in the function"
        )
    assert not module.first.any()


def test_buffers_of_nested_programs_are_written_to():
    iris.iris(1 << 20)

    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, x):
            self.calls += 1
            return [one for _ in range(2) for one in self.inner(x)], self.calls * x

    module, plain = iris.spmd(Outer(iris.spmd(Same(False)))), Outer(Same(False))
    for step in range(3):
        x = torch.arange(4.0) + step
        found, want = module(x), plain(x)
        assert all(map(torch.equal, (*found[0], found[1]), (*want[0], want[1])))
    assert_close(module.inner.first, plain.inner.first)


def test_a_buffer_that_is_written_to_and_replaced_is_refused():
    iris.iris(1 << 20)

    class Replaced(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x):
            self.seen += x
            self.seen = self.seen * 2
            return self.seen * 1

    module = iris.spmd(Replaced())
    before = module.seen
    for _ in range(3):
        with pytest.raises(TraceError, match=r"leaves a traced tensor in self\.seen"):
            module(torch.ones(2))
        assert module.seen is before
        assert not before.any()


def test_writes_to_what_is_no_buffer_are_refused():
    iris.iris(1 << 20)

    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2), requires_grad=False)
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x):
            return self.weight.add_(x)

    with pytest.raises(TraceError, match="changes in place a tensor that is not an argument") as e:
        iris.spmd(Grows())(torch.ones(2))
    assert type(e.value) is TraceError


def test_a_copy_is_another_module():
    iris.iris(1 << 20)
    block = iris.spmd(Block())
    other = copy.deepcopy(block)
    other.linear.weight.data.zero_()
    check(block)
    check(other)


def test_parameters_have_names_and_types_in_the_graph():
    iris.iris(1 << 20)
    block = iris.spmd(Block())
    partition(block.linear, P())
    with torch.no_grad():
        text = block.forward.trace(torch.zeros(4, 8)).as_text()
    assert "%self_linear_weight: f32[8, 8], %self_linear_bias: f32[8]" in text


def test_training_is_that_of_the_plain_module():
    iris.iris(1 << 20)
    plain = Block()
    ours = iris.spmd(copy.deepcopy(plain))
    for seed in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        for module in (plain, ours):
            module.zero_grad()
            module(x).square().sum().backward()
        for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


def test_a_summary_of_what_never_ran_is_refused():
    iris.iris(1 << 20)
    module = iris.spmd(Block())
    with pytest.raises(SpecError) as error:
        iris.explain(module)
    assert str(error.value) == (
        "no program of this Block has run\n"
        "help: call it first: a decorated function or module, a parallelized model, or a model "
        'compiled with backend="iris"'
    )
    module(torch.ones(2, 8))
    assert iris.explain(module).fused[0].total == 1


def test_partition_of_an_unknown_tensor():
    with pytest.raises(SpecError) as error:
        partition(nn.Linear(2, 2), {"weigth": P("tp")})
    assert str(error.value) == "Linear holds no tensor 'weigth'\nhelp: it holds bias, weight"


SOURCES = {
    "another layer": (
        lambda path: iris.nn.ColumnParallelLinear.from_linear(nn.Conv1d(3, 3, 1)),
        "a Conv1d is no linear layer with a weight [out, in]\n"
        "help: pass an nn.Linear, or the tensors as iris.nn.shards.StoredLinear(weight, bias)",
    ),
    "some biases": (
        lambda path: iris.nn.ParallelAttention.from_linear(
            *(nn.Linear(8, 8, bias=bias) for bias in (True, False, True, True)), heads=2, kv_heads=2
        ),
        "some of q, k and v have a bias, and some have none\n"
        "help: give all three a bias, of zeros where there was none",
    ),
    "another file": (
        lambda path: [path.write_bytes(b"none"), iris.nn.Checkpoint.open(path)],
        "FILE is no safetensors file: Error while deserializing header: header too small",
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_what_layers_are_not_made_from(name, tmp_path):
    iris.iris(1 << 20)
    path = tmp_path / "weights"
    with pytest.raises(SpecError) as error:
        SOURCES[name][0](path)
    assert str(error.value).replace(str(path), "FILE") == SOURCES[name][1]


def test_a_tensor_that_two_files_hold(tmp_path):
    for name in ("a", "b"):
        save_file({"up.weight": torch.zeros(2, 2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(SpecError) as error:
        iris.nn.Checkpoint.open(tmp_path)
    assert str(error.value) == (
        f"up.weight is in b.safetensors and in another file of {tmp_path}\n"
        "help: give one file, or a folder of the files of one model"
    )
    assert "up.weight" in iris.nn.Checkpoint.open(tmp_path / "a.safetensors")
