"""The demo runs on any number of ranks, says what is wrong, and notices a wrong result."""

import pytest
import torch

import iris
from iris.demo import __main__ as demo, block
from iris.demo.model import SmolLM2

pytestmark = pytest.mark.ranks

QUIET = ["--device", "cpu", "--question", ""]  # the block alone


@pytest.fixture(scope="module")
def model() -> SmolLM2:
    return SmolLM2.open()


@pytest.fixture(autouse=True)
def _read_once(model: SmolLM2, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SmolLM2, "open", lambda: model)


@pytest.mark.parametrize(
    ("ranks", "tokens"),
    [
        (2, 8),
        (3, 50),  # the last shard is smaller
        (4, 2),  # some are empty
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 8), (6, 50))),
    ],
    ids=str,
)
def test_ranks_agree_with_one(ranks: int, tokens: int, capsys: pytest.CaptureFixture[str]) -> None:
    code = demo.main(["--ranks", str(ranks), "--tokens", str(tokens), *QUIET])
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert "agrees with one rank" in shown
    assert shown.count(" = all_gather(") == shown.count(" = reduce_scatter(") == 1
    assert f"{-(-tokens // ranks)}x576" in shown


@pytest.mark.slow
def test_triton_lowering(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ranks", "2", "--tokens", "4", "--lowering", "triton", *QUIET]
    code = demo.main(options)
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert "torch ops" not in shown  # no stage fell back


@pytest.mark.parametrize("wrong", [1.0, float("nan")])
def test_a_wrong_result_is_noticed(
    wrong: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = block.one_rank

    def one_rank(**arguments: torch.Tensor) -> torch.Tensor:
        return right(**arguments) + wrong

    monkeypatch.setattr(block, "one_rank", one_rank)
    assert demo.main(["--ranks", "1", "--tokens", "2", *QUIET]) == 1
    assert "differs with one rank" not in (shown := capsys.readouterr().out)
    assert "differs from one rank" in shown


@pytest.mark.slow
def test_the_whole_model_answers(capfd: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--ranks", "3", "--tokens", "8", "--device", "cpu"]) == 0
    shown = capfd.readouterr().out
    assert "The capital of France is Paris.\n" in shown
    assert "60 matmul_all_reduce" in shown
    assert "124 of 124 collectives are in fused stages" in shown


def test_what_is_not_installed_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> SmolLM2:
        raise iris.UnsupportedError("no weights", help="install them")

    monkeypatch.setattr(SmolLM2, "open", missing)
    assert demo.main([]) == 1
    assert "UnsupportedError: no weights\nhelp: install them\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--ranks", "0", "'0' is not a whole number from 1 to 16"),
        ("--ranks", "two", "'two' is not a whole number from 1 to 16"),
        ("--tokens", "-1", "'-1' is not a whole number from 1 to 8192"),
        ("--prompt", "", "the prompt is empty: give at least one character"),
        ("--device", "tpu", "'tpu' is not one of cpu, "),
        ("--lowering", "cuda", "(choose from torch, triton)"),
    ],
)
def test_bad_values_say_what_is_allowed(
    option: str, value: str, allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main([f"{option}={value}"])
    assert allowed in capsys.readouterr().err.replace("'torch', 'triton'", "torch, triton")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_shards_are_those_of_chunk(ranks: int) -> None:
    tensor = torch.arange(14).view(7, 2)
    parts = [block.shard(tensor, 0, rank, ranks) for rank in range(ranks)]
    whole = [part for part in parts if len(part)]
    assert all(torch.equal(a, b) for a, b in zip(whole, tensor.chunk(ranks), strict=True))
