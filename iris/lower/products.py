"""Products as kernels compute them: ATen's products with a bias or scales, taken apart."""

from dataclasses import replace

from iris.graph.nodes import Arg, Node, Ref, Token, Value
from iris.graph.types import TensorType


class _Parts:
    """The nodes that stand for one product node, in order."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.made: list[Node] = []

    def add(self, op: str, args: tuple[Arg, ...], type_: TensorType) -> Ref:
        value = Value(f"{self.node.out.name}_part{len(self.made)}", type_)
        self.made.append(Node(op, args, (), (value,), self.node.loc))
        return Ref(value.name)

    def finish(self) -> list[Node]:
        """All parts, the last of which makes the node's value."""
        last = self.made[-1]
        if last.out.type.dtype != self.node.out.type.dtype:
            self.add("_to_copy", (Ref(last.out.name),), self.node.out.type)
            last = replace(self.made[-1], attrs=(("dtype", Token(self.node.out.type.dtype)),))
        return [*self.made[:-1], replace(last, outputs=self.node.outputs)]


def _addmm(node: Node) -> list[Node] | str:
    """``addmm(c, a, b) => a @ b + c``"""
    if node.attrs or len(node.args) != 3:
        return "addmm with alpha or beta"
    bias, left, right = node.args
    parts = _Parts(node)
    product = parts.add("matmul", (left, right), node.out.type)
    parts.add("add.Tensor", (product, bias), node.out.type)
    return parts.finish()


def _scaled_mm(node: Node) -> list[Node] | str:
    """``_scaled_mm(a, b, s, t, bias) => (a @ b * s * t + bias).to(dtype)``"""
    names = ("left", "right", "scale_a", "scale_b", "bias", "scale_result", "out_dtype", "fast")
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if given.get("scale_result") is not None:
        return "_scaled_mm with a scale of its result"
    wide = replace(node.out.type, dtype="f32")
    parts = _Parts(node)
    value = parts.add("matmul", (given["left"], given["right"]), wide)
    for scale in ("scale_a", "scale_b"):
        value = parts.add("mul.Tensor", (value, given[scale]), wide)
    if given.get("bias") is not None:
        parts.add("add.Tensor", (value, given["bias"]), wide)
    return parts.finish()


def _int_mm(node: Node) -> list[Node] | str:
    """``_int_mm(a, b) => a @ b`` of int8, in int32"""
    return [replace(node, op="matmul")]


PARTS = {"addmm": _addmm, "_scaled_mm": _scaled_mm, "_int_mm": _int_mm}


def expanded(stage: Node) -> tuple[list[Node], str]:
    """The stage's body with every product a plain one, or why one cannot be taken apart."""
    body: list[Node] = []
    for node in stage.body:
        parts = PARTS[node.op](node) if node.op in PARTS else [node]
        if isinstance(parts, str):
            return [], parts
        body += parts
    return body, ""


def is_fast(stage: Node) -> bool:
    """Whether every fp8 product of the stage may be summed in less than fp32."""
    scaled = [node for node in stage.body if node.op == "_scaled_mm"]
    return bool(scaled) and all(
        node.kwargs.get("use_fast_accum", node.args[7] if len(node.args) > 7 else False)
        for node in scaled
    )
