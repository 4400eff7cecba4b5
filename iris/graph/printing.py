"""Text of a graph. It says all of it, parses back (`iris.graph.parse`), and holds no addresses."""

import math

from iris.graph.nodes import Arg, Graph, Node, Ref, Token, Value

COMMENT_COLUMN = 72
RESERVED = {"None", "True", "False", "inf", "nan"}


def format_graph(graph: Graph) -> str:
    """The whole text of ``graph``."""
    inputs = ", ".join(format_value(value) for value in graph.inputs)
    lines = [f"graph {graph.name}[{graph.mesh}]({inputs}):"]
    for node in graph.nodes:
        lines += format_node(node, indent=2)
    lines += [f"  write %{target} <- %{value}" for target, value in graph.writes]
    lines.append(f"  return {', '.join(format_arg(arg) for arg in graph.outputs)}".rstrip())
    return "\n".join(lines) + "\n"


def format_node(node: Node, indent: int = 0) -> list[str]:
    """Lines of ``node``; a stage is followed by its body, indented."""
    outputs = ", ".join(format_value(value) for value in node.outputs)
    args = [format_arg(arg) for arg in node.args]
    args += [f"{key}={format_arg(value)}" for key, value in node.attrs]
    text = " " * indent + (f"{outputs} = " if outputs else "") + f"{node.op}({', '.join(args)})"
    if node.body:
        text += ":"
    if node.loc:
        text = f"{text:<{COMMENT_COLUMN}}  # {node.loc}"
    lines = [text]
    for inner in node.body:
        lines += format_node(inner, indent + 4)
    return lines


def format_value(value: Value) -> str:
    return f"%{value.name}: {value.type}"


def format_arg(arg: Arg) -> str:
    """One argument as text: ``%x``, ``0``, ``1.5``, ``tp``, ``(2, 3)``, ``:f32``."""
    if isinstance(arg, Ref):
        return f"%{arg.name}"
    if isinstance(arg, Token):
        return f":{arg.text}"
    if isinstance(arg, tuple):
        inner = ", ".join(format_arg(item) for item in arg)
        return f"({inner},)" if len(arg) == 1 else f"({inner})"
    if isinstance(arg, str):
        return arg if arg.isidentifier() and arg not in RESERVED else repr(arg)
    if isinstance(arg, float) and not math.isfinite(arg):
        return "nan" if math.isnan(arg) else ("inf" if arg > 0 else "-inf")
    return repr(arg)
