"""Which sizes of a dynamic graph may be rounded up, and what pads and cuts at its ends.

A symbol may be padded where rows along it stay apart in every op: then rows that were added change
no row that was asked for. So a model that sees many lengths needs few programs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SHORTEST = 16
SAME = {
    "alias", "detach", "clone", "_to_copy", "t", "transpose", "permute", "unsqueeze", "squeeze",
    "expand", "embedding", "wait_tensor", "all_reduce", "full_like", "zeros_like", "ones_like",
}  # fmt: skip
VIEWS = {"view", "_unsafe_view", "reshape"}


def rounded(size: int) -> int:
    """``size``, or the power of two above it; at least `SHORTEST`.

    >>> rounded(33)
    64
    """
    return max(SHORTEST, 1 << max(size - 1, 0).bit_length())


@dataclass(frozen=True)
class Padding:
    """Dims that carry a symbol: of inputs by number, and of outputs; ``sizes`` are inputs that are
    the symbol itself.
    """

    sizes: dict[int, Any]
    inputs: dict[int, dict[int, Any]]
    outputs: dict[int, dict[int, Any]]

    def __call__(self, run: Callable[..., Sequence[Any]], args: Sequence[Any]) -> Sequence[Any]:
        """``run(*args)`` at rounded sizes."""
        asked = {symbol: args[index] for index, symbol in self.sizes.items()}
        given: list[Any] = [rounded(arg) if i in self.sizes else arg for i, arg in enumerate(args)]
        for index, dims in self.inputs.items():
            x = given[index]
            shape = [rounded(n) if d in dims else n for d, n in enumerate(x.shape)]
            if shape != list(x.shape):
                given[index] = x.new_zeros(shape)
                given[index][tuple(map(slice, x.shape))] = x
        results = list(run(*given))
        for index, dims in self.outputs.items():
            for dim, symbol in dims.items():
                results[index] = results[index].narrow(dim, 0, asked[symbol])
        return results


def padding_of(graph: Any) -> Padding | None:
    """What pads every symbol of a dynamic ``graph``; None where there is none, or rows meet."""
    places = graph.find_nodes(op="placeholder")
    vals = [node.meta.get("val") for node in places]
    sizes = {i: val.node.expr for i, val in enumerate(vals) if isinstance(val, torch.SymInt)}
    symbols = set(sizes.values())
    if not symbols or not all(symbol.is_symbol for symbol in symbols):
        return None
    if not all(_apart(node) for node in graph.nodes if node.op == "call_function"):
        return None
    (outputs,) = graph.output_node().args
    results = [getattr(value, "meta", {}).get("val") for value in outputs]
    ends = [_dims(vals), _dims(results)]
    if any(symbol not in symbols for end in ends for d in end.values() for symbol in d.values()):
        return None
    if any(isinstance(result, torch.SymInt) for result in results):
        return None
    return Padding(sizes, *ends)


def _dims(vals: Sequence[Any]) -> dict[int, dict[int, Any]]:
    found = {i: _symbolic(val) for i, val in enumerate(vals) if isinstance(val, Tensor)}
    return {i: dims for i, dims in found.items() if dims}


def _symbolic(value: Any) -> dict[int, Any]:
    """Dims of ``value`` whose size is not a number, with its expression."""
    return {d: n.node.expr for d, n in enumerate(value.shape) if isinstance(n, torch.SymInt)}


def _apart(node: Any) -> bool:
    """Whether rows along symbols stay apart in ``node``."""
    vals = [n.meta.get("val") for n in node.all_input_nodes]
    tensors = [val for val in vals if isinstance(val, Tensor)]
    result = node.meta.get("val")
    name = getattr(node.target, "__name__", "").partition(".")[0]
    if isinstance(result, torch.SymInt):  # what reads it is looked at there
        return True
    if not any(map(_symbolic, tensors)):
        return not any(isinstance(val, torch.SymInt) for val in vals)
    if name in VIEWS:
        return _inner(tensors[0]) is not None and _inner(tensors[0]) == _inner(result)
    if name in SAME:
        return True
    if any(isinstance(val, torch.SymInt) for val in vals):
        return False
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return True
    rule = RULES.get(name)
    return rule is not None and rule(node, tensors)


def _inner(value: Any) -> Any:
    """Elements between one row and the next along the only symbolic dim of ``value``.

    A view that keeps them keeps rows apart, also where it joins the symbol to dims outside it.
    """
    dims = _symbolic(value)
    return math.prod(value.shape[max(dims) + 1 :]) if len(dims) == 1 else None


def _product(node: Any, tensors: Sequence[Any]) -> bool:
    """Products contract over dims of fixed size."""
    left, right = tensors[-2:] if len(tensors) > 1 else (*tensors, *tensors)
    return isinstance(left.shape[-1], int) and isinstance(right.shape[-2], int)


def _reduction(node: Any, tensors: Sequence[Any]) -> bool:
    """Reductions run over dims of fixed size."""
    over = node.args[1] if len(node.args) > 1 else None
    dims = (over,) if isinstance(over, int) else tuple(over or range(tensors[0].dim()))
    return not any(dim % tensors[0].dim() in _symbolic(tensors[0]) for dim in dims)


def _norm(node: Any, tensors: Sequence[Any]) -> bool:
    return all(isinstance(n, int) for n in node.args[1])


def _attention(node: Any, tensors: Sequence[Any]) -> bool:
    """Causal attention without a mask: rows see none after them."""
    inputs = set(node.all_input_nodes)
    alone = all(2 not in _symbolic(tensor) for tensor in tensors)  # the batch is the symbol
    causal = node.kwargs.get("is_causal", node.args[4] if len(node.args) > 4 else False)
    return inputs <= set(node.args[:3]) and (alone or causal is True)


RULES: dict[str, Callable[[Any, Sequence[Any]], bool]] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _product),
    **dict.fromkeys(("_softmax", "_log_softmax", "mean", "sum", "amax", "amin"), _reduction),
    **dict.fromkeys(("_fused_rms_norm", "native_layer_norm"), _norm),
    **dict.fromkeys(
        ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
        _attention,
    ),
}
