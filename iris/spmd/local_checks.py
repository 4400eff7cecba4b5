"""What a local mesh refuses, in words."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from iris.errors import SpecError, TypeRuleError, UnsupportedError
from iris.spmd.binding import Bound
from iris.spmd.local_rank import Difference
from iris.spmd.specs import Leaf
from iris.spmd.statics import SIMPLE


def check_claims(name: str, leaves: Sequence[Leaf]) -> None:
    """Every tensor has a spec that says which rank holds what of it."""
    wrong = [
        f"{leaf.path}: {'no spec' if leaf.spec is None else f'{leaf.spec} is partial'}"
        for leaf in leaves
        if leaf.spec is None or leaf.spec.partial
    ]
    if wrong:
        raise SpecError(
            f"{name}: {len(wrong)} global tensors cannot be split or joined\n  "
            + "\n  ".join(wrong),
            help="give each a P: P('tp') splits dim 0, P() is the whole tensor on every rank",
        )


def check_grad(name: str, bound: Bound, instance: Any) -> None:
    """No gradient is asked for."""
    held = instance.parameters() if isinstance(instance, nn.Module) else ()
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*bound.tensors, *held)):
        raise UnsupportedError(
            f"{name}: an argument or parameter requires grad, "
            "and a local mesh does not differentiate",
            help="call it under torch.no_grad(), or differentiate inside the program",
        )


def check_equal(
    name: str, results: int, written: Sequence[int], differences: Sequence[Difference]
) -> None:
    """Every rank has the same bits wherever the out-specs say so."""
    if not differences:
        return
    lines = [f"{_title(leaf, results, written)} {text}" for leaf, text in differences]
    raise TypeRuleError(
        f"{name}: a replicated result is not the same on all ranks\n  " + "\n  ".join(lines),
        help="split it by its out-spec, or find what differs: random numbers, or state of a rank",
    )


def check_constants(name: str, rows: Sequence[Sequence[Any]]) -> None:
    """What is returned beside tensors is the same on all ranks."""
    lines = [
        f"[{', '.join(shown)}] on ranks 0 to {len(rows) - 1}"
        for leaves in zip(*rows, strict=True)
        if any(type(leaf) in SIMPLE for leaf in leaves)
        and len(set(shown := [*map(repr, leaves)])) > 1  # one nan is not another
    ]
    if lines:
        raise TypeRuleError(
            f"{name}: a result is no tensor, and differs between ranks\n  " + "\n  ".join(lines),
            help="return it as a tensor with a spec, or ask by mesh.run",
        )


def _title(number: int, results: int, written: Sequence[int]) -> str:
    if number >= results:
        return f"argument {written[number - results]}"
    return "the result" if results == 1 else f"result {number}"
