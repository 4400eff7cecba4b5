"""Pictures of graphs: well-formed, complete, no box over another."""

import itertools
from pathlib import Path
from xml.etree import ElementTree

import pytest

from iris.errors import UnsupportedError
from iris.graph.draw import draw
from iris.graph.layout import layered
from iris.graph.parse import parse
from iris.graph.passes import run_passes

pytestmark = pytest.mark.cpu

TEXT = """\
graph mlp[tp=4](%x: bf16[64/tp, 8], %w1: bf16[8, 32/tp], %w3: bf16[8, 32/tp], %w2: bf16[32/tp, 8]):
  %0: bf16[64, 8] = all_gather(%x, axis=tp, dim=0)                        # mlp.py:9
  %1: bf16[64, 32/tp] = matmul(%0, %w1)                                   # mlp.py:9
  %2: bf16[64, 32/tp] = matmul(%0, %w3)                                   # mlp.py:9
  %3: bf16[64, 32/tp] = silu(%1)                                          # mlp.py:9
  %4: bf16[64, 32/tp] = mul.Tensor(%3, %2)                                # mlp.py:9
  %5: bf16[64, 8]+tp = matmul(%4, %w2)                                    # mlp.py:10
  %6: bf16[64/tp, 8] = reduce_scatter(%5, axis=tp, dim=0, op=sum)         # mlp.py:10
  %7: bf16[64/tp, 8] = add.Tensor(%x, %6)                                 # mlp.py:11
  write %x <- %7
  return %7, None
"""
SVG = "{http://www.w3.org/2000/svg}"


def test_every_stage_op_type_and_end_is_in_the_picture() -> None:
    root = ElementTree.fromstring(draw(run_passes(parse(TEXT))))
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    for expected in (
        "all_gather_matmul  mlp.py:9",
        "all_gather(%x, axis=tp, dim=0)",
        "mul(%3, %2)",
        "matmul_reduce_scatter  mlp.py:10",
        "%4: bf16[64, 32/tp]",
        "%x: bf16[64/tp, 8]",
        "write %x",
        "return %7",
        "return None",
        "mlp  [tp=4]",
    ):
        assert expected in texts
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for box in root.iter(f"{SVG}rect"):
        if "x" in box.attrib:
            assert 0 <= float(box.attrib["x"]) <= width - float(box.attrib["width"])
            assert 0 <= float(box.attrib["y"]) <= height - float(box.attrib["height"])


def test_boxes_do_not_overlap_and_edges_go_down() -> None:
    sizes = {name: (40.0 + 10 * i, 20.0) for i, name in enumerate("abcdefgh")}
    edges = [(a, b, a) for a, b in ("ab", "ac", "ad", "be", "ce", "de", "ae", "ef", "gf", "hg")]
    layout = layered(sizes, edges)
    for a, b in itertools.combinations(sizes, 2):
        gap_x = abs(layout.centres[a][0] - layout.centres[b][0])
        gap_y = abs(layout.centres[a][1] - layout.centres[b][1])
        assert gap_x >= (sizes[a][0] + sizes[b][0]) / 2 or gap_y >= 20
    for route in layout.routes.values():
        assert [y for _, y in route] == sorted(y for _, y in route)
    # what leads to one box only is right above it
    assert layout.centres["g"][1] == layout.centres["e"][1]


def test_files(tmp_path: Path) -> None:
    graph = parse(TEXT)
    assert draw(graph, tmp_path / "g.svg") == (tmp_path / "g.svg").read_text()
    pytest.importorskip("matplotlib")
    draw(graph, tmp_path / "g.png")
    assert (tmp_path / "g.png").read_bytes().startswith(b"\x89PNG")


def test_other_endings_are_refused() -> None:
    with pytest.raises(UnsupportedError) as caught:
        draw(parse(TEXT), "g.gif")
    assert str(caught.value) == "cannot draw to g.gif\nhelp: use a name ending in .svg or .png"


def test_an_empty_graph() -> None:
    assert draw(parse("graph f[]():\n  return\n")).startswith("<svg")


def test_a_chain_is_one_box_unless_it_waits_for_another() -> None:
    text = """\
graph f[](%x: f32[4, 2], %y: f32[4, 2]):
  %0: f32[4, 2] = exp(%x)
  %1: f32[4, 2] = mul.Tensor(%0, %x)
  %2: f32[4, 2] = exp(%y)
  %3: f32[4, 2] = sin(%2)
  %4: f32[4, 2] = add.Tensor(%1, %3)
  %5: f32[4, 2] = neg(%4)
  return %4, %5
"""
    edges = draw(parse(text)).count("<path") // 2  # a line and its arrow head
    boxes = ["x", "y", "exp mul", "exp sin", "add", "neg", "return", "return"]
    assert edges == len(boxes) - 1
