"""Passes keep the meaning, types never lie, text parses back: over random programs on 1 to 4 ranks.

Torch runs each op of a random program on every rank's own tensors. So a program comes with its
graph and inferred types, and with what torch makes of every value on every rank. The numpy
reference is not used to build it, but for the collectives.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from iris.errors import TypeRuleError
from iris.graph.nodes import Arg, Graph, Node, Ref, Token, Value
from iris.graph.ops import COLLECTIVES, InferContext, Local, get_op, group_size, infer_node
from iris.graph.ops.groups import coordinates
from iris.graph.parse import parse
from iris.graph.passes import PASSES, fusion_report, run_passes
from iris.graph.reference import run, shard
from iris.graph.types import Mesh, TensorType

AXES = (("tp", 1), ("tp", 2), ("tp", 3), ("tp", 4))
DTYPES = {torch.float32: "f32", torch.int64: "i64", torch.bool: "bool", torch.float64: "f64"}
PLAIN = {"matmul": "mm"}

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class Refused(Exception):
    """An op that does not go with these operands."""


@dataclass
class Program:
    """A graph under construction. ``arrays[name][rank]`` is what torch computed."""

    mesh: Mesh
    inputs: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    arrays: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)

    def add_input(self, type: TensorType, data: np.ndarray) -> str:
        name = f"x{len(self.inputs)}"
        self.inputs.append(Value(name, type))
        self.types[name] = type
        self.arrays[name] = [torch.from_numpy(a.copy()) for a in shard(data, type, self.mesh)]
        return name

    def add(self, names: list[str], call: Callable[..., Call]) -> str:
        """One op on ``names``; the name of its first output. Refused if torch or a rule says no.

        ``call`` gives op and arguments from one rank's tensors.
        """
        by_rank = [call(*arrays) for arrays in zip(*(self.arrays[n] for n in names), strict=True)]
        op, args, attrs = by_rank[0]
        known = {id(self.arrays[n][0]): n for n in names}

        def ref(arg: Any) -> Arg:
            if isinstance(arg, torch.Tensor):
                return Ref(known[id(arg)])
            return tuple(map(ref, arg)) if isinstance(arg, tuple) else arg

        node_args = tuple(map(ref, args))
        results = self._results(op, by_rank, node_args)
        if results is None:
            raise Refused
        context = InferContext(self.mesh, self.mesh.origin, f"p.py:{len(self.nodes)}")
        locals_ = [Local(DTYPES[out[0].dtype], tuple(out[0].shape)) for out in results]
        typed = [self._typed(arg) for arg in node_args]
        try:
            types = infer_node(op, context, typed, attrs, locals_)
        except TypeRuleError:
            raise Refused from None
        if any(
            self._loses_uneven_dim(names, t, out) for t, out in zip(types, results, strict=True)
        ):
            raise Refused
        values = []
        for type, out in zip(types, results, strict=True):
            value = Value(f"v{len(self.types)}", type)
            values.append(value)
            self.types[value.name] = type
            self.arrays[value.name] = out
        fields = tuple(attrs.items())
        self.nodes.append(Node(op, node_args, fields, tuple(values), f"p.py:{len(self.nodes)}"))
        return values[0].name

    def _results(self, op: str, by_rank: list[Call], args: tuple[Arg, ...]) -> Any:
        """Every output on every rank, or None if torch refuses."""
        if op in COLLECTIVES or op == "axis_index":
            return self._collective(op, by_rank, args)
        outs = []
        for name, operands, given_attrs in by_rank:
            attrs = {
                k: torch.float32 if isinstance(v, Token) else v for k, v in given_attrs.items()
            }
            packet, _, overload = PLAIN.get(name, name).partition(".")
            try:
                out = getattr(getattr(torch.ops.aten, packet), overload or "default")(
                    *operands, **attrs
                )
            except (RuntimeError, IndexError, NotImplementedError):
                return None
            outs.append(out if isinstance(out, list | tuple) else [out])
        if len({len(out) for out in outs}) > 1:
            return None
        return [list(ranks) for ranks in zip(*outs, strict=True)]

    def _collective(self, op: str, by_rank: list[Call], args: tuple[Arg, ...]) -> Any:
        attrs = by_rank[0][2]
        node = Node(op, args, tuple(attrs.items()), ())
        arrays = [
            [t.numpy() for t in self.arrays[arg.name]] for arg in args if isinstance(arg, Ref)
        ]
        try:
            results = get_op(op).reference(node, arrays, attrs, self.mesh)
        except (ValueError, IndexError):
            return None  # shards that do not fit: the type rule refuses it too
        return [[torch.from_numpy(np.array(a)) for a in out] for out in results]

    def _typed(self, arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return self.types[arg.name]
        return tuple(map(self._typed, arg)) if isinstance(arg, tuple) else arg

    def _loses_uneven_dim(self, names: list[str], out: TensorType, arrays: Any) -> bool:
        """Whether ranks get different shapes because an uneven dim did not pass through.

        Types say nothing of such values: local shapes of a varying value have to agree.
        """
        places = coordinates(self.mesh)
        if all(
            out.local_shape(self.mesh, p) == tuple(a.shape)
            for p, a in zip(places, arrays, strict=True)
        ):
            return False
        kept = set(zip(out.shape, out.spec, strict=True))
        operands = [self.types[name] for name in names]
        dims = {d for t in operands for d in zip(t.shape, t.spec, strict=True)}
        return any(n % group_size(self.mesh, axes) for n, axes in dims - kept)

    @property
    def graph(self) -> Graph:
        refs = tuple(Ref(name) for name in self.outputs)
        return Graph("p", self.mesh, tuple(self.inputs), tuple(self.nodes), refs)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self.graph))

    def input_arrays(self) -> list[list[np.ndarray]]:
        return [[t.numpy() for t in self.arrays[v.name]] for v in self.inputs]


def check_types(program: Program) -> None:
    """No type claims what torch's values deny: shapes on all ranks, equality where replicated."""
    mesh = program.mesh
    places = coordinates(mesh)
    for name, type in program.types.items():
        arrays = program.arrays[name]
        for coord, array in zip(places, arrays, strict=True):
            assert type.local_shape(mesh, coord) == tuple(array.shape), (name, type, coord)
        for axis in mesh.names:
            if type.replicated_over(axis):
                for coord, array in zip(places, arrays, strict=True):
                    first = places.index({**coord, axis: 0})
                    assert torch.equal(array.nan_to_num(), arrays[first].nan_to_num()), (name, type)


meshes = st.one_of(
    st.sampled_from(AXES).map(lambda axis: Mesh((axis,))), st.just(Mesh((("dp", 2), ("tp", 2))))
)


@st.composite
def input_types(draw: st.DrawFn, mesh: Mesh) -> TensorType:
    """A matrix or a 3-D activation; some dims split, evenly or not; perhaps varying."""
    shape = draw(
        st.one_of(
            st.tuples(st.sampled_from((4, 5, 8)), st.sampled_from((4, 8))),
            st.tuples(st.just(2), st.sampled_from((2, 4)), st.sampled_from((4, 8))),
            st.tuples(st.sampled_from((4, 8))),
        )
    )
    spec: list[tuple[str, ...]] = [()] * len(shape)
    varying = []
    for axis in mesh.names:
        where = draw(st.sampled_from((None, None, "varying", *range(len(shape)))))
        if where == "varying":
            varying.append(axis)
        elif where is not None:
            spec[where] = (*spec[where], axis)
    return TensorType("f32", shape, tuple(spec), varying=tuple(varying))


def unary_calls(draw: st.DrawFn, x: torch.Tensor) -> Callable[..., Call]:
    """An op on one value of this many dims; arguments follow each rank's shape."""
    last = x.dim() - 1
    dim = draw(st.integers(0, max(last, 0)))
    choices: list[Callable[..., Call]] = [
        lambda t: ("silu", (t,), {}),
        lambda t: ("relu", (t,), {}),
        lambda t: ("neg", (t,), {}),
        lambda t: ("clone", (t,), {}),
        lambda t: ("_to_copy", (t,), {"dtype": Token("f32")}),
        lambda t: ("mul.Tensor", (t, 0.5), {}),
        lambda t: ("add.Tensor", (t, 1), {}),
        lambda t: ("clamp", (t, -2, 2), {}),
        lambda t: ("mul.Tensor", (t, t), {}),
    ]
    if x.dim():
        choices += [
            lambda t: ("sum.dim_IntList", (t, (dim,)), {}),
            lambda t: ("sum", (t,), {}),
            lambda t: ("mean.dim", (t, (dim,), True), {}),
            lambda t: ("amax", (t, (dim,)), {}),
            lambda t: ("_softmax", (t, dim, False), {}),
            lambda t: ("cumsum", (t, dim), {}),
            lambda t: ("transpose.int", (t, 0, dim), {}),
            lambda t: ("unsqueeze", (t, dim), {}),
            lambda t: ("view", (t, tuple(t.shape)), {}),
            lambda t: ("view", (t, (math.prod(t.shape[:-1]), t.shape[-1])), {}),
            lambda t: ("view", (t, (*t.shape[:-1], 2, t.shape[-1] // 2)), {}),
            lambda t: ("flip", (t, (dim,)), {}),
            lambda t: ("expand", (t, (2, *t.shape)), {}),
            lambda t: ("cat", ((t, t), dim), {}),
            lambda t: ("stack", ((t, t), dim), {}),
            lambda t: ("split.Tensor", (t, t.shape[dim] // 2, dim), {}),
            lambda t: ("slice.Tensor", (t, dim, 0, t.shape[dim] // 2), {}),
            lambda t: ("select.int", (t, dim, -1), {}),
            lambda t: ("zeros_like", (t,), {}),
        ]
    if x.dim() == 2:
        choices.append(lambda t: ("t", (t,), {}))
    return draw(st.sampled_from(choices))


def binary_calls(draw: st.DrawFn, x: torch.Tensor, y: torch.Tensor) -> Callable[..., Call]:
    choices: list[Callable[..., Call]] = [
        lambda a, b: ("add.Tensor", (a, b), {}),
        lambda a, b: ("mul.Tensor", (a, b), {}),
        lambda a, b: ("sub.Tensor", (a, b), {"alpha": 2}),
        lambda a, b: ("maximum", (a, b), {}),
    ]
    if x.dim() == y.dim() == 2:
        choices += [lambda a, b: ("matmul", (a, b), {})] * 6
    return draw(st.sampled_from(choices))


def collective_calls(draw: st.DrawFn, mesh: Mesh, x: torch.Tensor) -> Callable[..., Call]:
    axis = draw(st.sampled_from((*mesh.names, mesh.names)))
    axis = axis[0] if len(axis) == 1 else axis
    size = math.prod(mesh.size(a) for a in ((axis,) if isinstance(axis, str) else axis))
    op = draw(st.sampled_from(("sum", "sum", "max", "avg")))
    dim, other = (draw(st.integers(0, max(x.dim() - 1, 0))) for _ in range(2))
    ring = tuple((i, (i + 1) % size) for i in range(size))
    choices: list[Callable[..., Call]] = [
        lambda t: ("all_reduce", (t,), {"axis": axis, "op": op}),
        lambda t: ("broadcast", (t,), {"axis": axis, "src": size - 1}),
        lambda t: ("ppermute", (t,), {"axis": axis, "perm": ring}),
        lambda t: ("ppermute", (t,), {"axis": axis, "perm": ring[1:]}),
    ]
    if x.dim():
        choices += [
            lambda t: ("all_gather", (t,), {"axis": axis, "dim": dim}),
            lambda t: ("all_gather", (t,), {"axis": axis, "dim": 0}),
            lambda t: ("reduce_scatter", (t,), {"axis": axis, "dim": dim, "op": op}),
            lambda t: ("reduce_scatter", (t,), {"axis": axis, "dim": 0, "op": "sum"}),
            lambda t: ("all_to_all", (t,), {"axis": axis, "split_dim": dim, "concat_dim": other}),
        ]
    return draw(st.sampled_from(choices))


def add_layer(draw: st.DrawFn, program: Program, x: str) -> None:
    """A linear layer as people write them: perhaps gathered, biased, activated, reduced, normed."""
    yes, axis = st.booleans(), draw(st.sampled_from(program.mesh.names))
    dims = program.arrays[x][0].dim()
    if dims < 2:
        return
    if draw(yes):
        dim = draw(st.integers(0, dims - 1))
        x = program.add([x], lambda t: ("all_gather", (t,), {"axis": axis, "dim": dim}))
    outs = [_linear(draw, program, x, axis) for _ in range(draw(st.integers(1, 2)))]
    h = outs[0]
    if len(outs) == 2:
        gate = program.add([outs[1]], lambda t: ("silu", (t,), {}))
        h = program.add([h, gate], lambda a, b: ("mul.Tensor", (a, b), {}))
    if draw(yes):
        h = program.add([h], lambda t: ("mul.Tensor", (t, 0.5), {}))
    for kind in draw(st.sampled_from(((), ("all_reduce",), ("reduce_scatter",), ("all_gather",)))):
        attrs = {"axis": axis, "op": "sum"} if kind == "all_reduce" else {"axis": axis, "dim": 0}
        h = program.add([h], lambda t, kind=kind, attrs=attrs: (kind, (t,), attrs))
    if draw(yes):
        h = program.add([h, x], lambda a, b: ("add.Tensor", (a, b), {}))
    if draw(yes):
        _norm(program, h)


def _linear(draw: st.DrawFn, program: Program, x: str, axis: str) -> str:
    """``x @ w`` or ``x @ w.t() + b`` with a new weight; 3-D values go through views."""
    array = program.arrays[x][0]
    n, split = draw(st.sampled_from((4, 8))), draw(st.sampled_from(("rows", "columns", None)))
    k, ranks = array.shape[-1], program.mesh.size(axis)
    shape = (k * ranks if split == "rows" else k, n * ranks if split == "columns" else n)
    spec = ((axis,) if split == "rows" else (), (axis,) if split == "columns" else ())
    bias = TensorType("f32", shape[1:], spec[1:])
    transposed = draw(st.booleans())
    if transposed:
        shape, spec = shape[::-1], spec[::-1]
    data = np.arange(math.prod(shape)).reshape(shape) % 5 - 2
    w = program.add_input(TensorType("f32", shape, spec), data.astype(np.float32))
    if transposed:
        w = program.add([w], lambda t: ("t", (t,), {}))
    whole = x
    if array.dim() == 3:
        x = program.add([x], lambda t: ("view", (t, (t.shape[0] * t.shape[1], t.shape[2])), {}))
    if draw(st.booleans()):
        b = program.add_input(bias, np.ones(bias.shape, np.float32))
        out = program.add([b, x, w], lambda b, x, w: ("addmm", (b, x, w), {}))
    else:
        out = program.add([x, w], lambda x, w: ("matmul", (x, w), {}))
    if array.dim() == 3:
        view = [out, whole]
        out = program.add(view, lambda t, x: ("view", (t, (*x.shape[:-1], t.shape[1])), {}))
    return out


def _norm(program: Program, h: str) -> str:
    """RMSNorm written out."""
    square = program.add([h], lambda t: ("pow.Tensor_Scalar", (t, 2), {}))
    mean = program.add([square], lambda t: ("mean.dim", (t, (-1,), True), {}))
    shifted = program.add([mean], lambda t: ("add.Scalar", (t, 1e-5), {}))
    scale = program.add([shifted], lambda t: ("rsqrt", (t,), {}))
    return program.add([h, scale], lambda a, b: ("mul.Tensor", (a, b), {}))


def add_step(draw: st.DrawFn, program: Program, kind: str, x: str, y: str) -> None:
    a, b = program.arrays[x][0], program.arrays[y][0]
    if kind == "unary":
        program.add([x], unary_calls(draw, a))
    elif kind == "binary":
        program.add([x, y], binary_calls(draw, a, b))
    elif kind == "layer":
        add_layer(draw, program, x)
    else:
        program.add([x], collective_calls(draw, program.mesh, a))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A program of a few layers and single ops, some of its values as outputs."""
    program = Program(draw(meshes))
    seed = np.random.default_rng(draw(st.integers(0, 2**16)))
    for _ in range(draw(st.integers(2, 4))):
        type = draw(input_types(program.mesh))
        program.add_input(type, seed.integers(-2, 3, type.shape).astype(np.float32))
    kinds = st.sampled_from(("unary", "binary", "collective", "layer", "layer"))
    for kind in draw(st.lists(kinds, min_size=1, max_size=8)):
        names = list(program.arrays)
        recent = st.sampled_from(names[-4:] + names)
        x, y = draw(recent), draw(recent)
        with contextlib.suppress(Refused):
            add_step(draw, program, kind, x, y)
    names = list(program.arrays)
    some = st.sampled_from(names[-3:] + names)
    program.outputs = draw(st.lists(some, min_size=1, max_size=3))
    return program


pytestmark = pytest.mark.cpu
quick = settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def assert_equal(left: Graph, right: Graph, program: Program) -> None:
    a, b = (run(graph, program.input_arrays()) for graph in (left, right))
    for xs, ys in zip(a.outputs, b.outputs, strict=True):
        for x, y in zip(xs, ys, strict=True):
            np.testing.assert_array_equal(x, y)


@quick
@given(programs())
def test_passes_keep_the_meaning(program: Program) -> None:
    graph = program.graph
    fused = run_passes(graph)
    assert_equal(graph, fused, program)
    assert run_passes(fused) == fused
    for step in PASSES:
        assert_equal(graph, step(graph), program)
    alone = {unfused.value for unfused in fusion_report(fused)}
    assert alone == {
        node.out.name for node in fused.nodes if node.op in COLLECTIVES and not node.body
    }


@quick
@given(programs())
def test_types_never_lie_and_the_reference_is_torch(program: Program) -> None:
    check_types(program)
    program.outputs = list(program.types)
    result = run(program.graph, program.input_arrays())
    for name, arrays in zip(program.types, result.outputs, strict=True):
        for ours, torchs in zip(arrays, program.arrays[name], strict=True):
            np.testing.assert_allclose(ours, torchs.numpy(), rtol=1e-4, atol=1e-4, err_msg=name)


@quick
@given(programs())
def test_text_parses_back(program: Program) -> None:
    graph = program.graph
    for form in (graph, run_passes(graph)):
        assert parse(str(form)) == form
