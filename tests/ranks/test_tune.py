"""Measured choices: agreed on by all ranks, kept on disk, ignored where they are not ours."""

import json
import os
from pathlib import Path

import pytest
import torch

import iris
from iris import P
from iris.errors import UnsupportedError
from iris.lower import tuned
from iris.testing import small_integers

pytestmark = pytest.mark.ranks


@iris.spmd(in_specs=(P("tp", None), P(None, "tp")), out_specs=P(None, "tp"), lowering="triton")
def up(x, w):
    return torch.relu(iris.all_gather(x, "tp", dim=0) @ w)


def _arguments(ctx):
    return small_integers((8, 16), ctx.cur_rank), small_integers((16, 8), ctx.cur_rank, seed=1)


def _why(x, w):
    (row,) = up.explain(x, w).rows
    return row.choice.algorithm, row.choice.why, len(row.choice.candidates)


def _tunes(folder):
    os.environ["IRIS_CACHE_DIR"] = folder
    ctx = iris.iris(1 << 22)
    x, w = _arguments(ctx)
    want, before = up(x, w), _why(x, w)
    found = iris.tune(up, x, w)
    assert all(time > 0 for times in found.times.values() for time in times.values())
    (times,) = found.times.values()
    best = min(times, key=times.get)
    assert _why(x, w) == (best, "measured", 2)
    assert torch.equal(up(x, w), want)
    return before, best, times


def _read(folder, algorithm):
    """Rank 0's folder says that ``algorithm`` is the fastest; other ranks' folders are empty."""
    ctx = iris.iris(1 << 22)
    os.environ["IRIS_CACHE_DIR"] = folder if ctx.cur_rank == 0 else f"{folder}-{ctx.cur_rank}"
    up.forget()
    x, w = _arguments(ctx)
    up(x, w)
    return _why(x, w)


def test_what_was_measured_is_used_and_kept(ranks, tmp_path):
    results = ranks(2).run(_tunes, str(tmp_path))
    assert results[0] == results[1]
    before, best, times = results[0]
    assert before == ("fused", "one kernel computes and communicates", 0)
    (file,) = tmp_path.glob("tuned/*.json")
    assert list(json.loads(file.read_text()).values()) == [times]
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert ranks(2).run(_read, str(tmp_path), best) == [(best, "measured", 2)] * 2
    # What the file says counts, on ranks that cannot read it too.
    other = {"fused": "unfused", "unfused": "fused"}[best]
    stage = next(iter(json.loads(file.read_text())))
    file.write_text(json.dumps({stage: {best: 2.0, other: 1.0}}))
    assert ranks(2).run(_read, str(tmp_path), other) == [(other, "measured", 2)] * 2


@pytest.mark.parametrize("text", ["not json", "[1]", '{"a": 3}', '{"a": {"fused": "x"}}'])
def test_a_file_that_is_not_ours_is_ignored(tmp_path, caplog, text):
    path = Path(tmp_path) / "tuned.json"
    path.write_text(text)
    assert tuned._read(path) == {}
    assert f"{path} is ignored" in caplog.text


def _refused():
    ctx = iris.iris(1 << 20)
    x, w = _arguments(ctx)
    texts = []
    for fn in (iris.spmd(lambda a, b: iris.all_gather(a, "tp", dim=0) @ b), _in_place):
        with pytest.raises(UnsupportedError) as raised:
            iris.tune(fn, x, w)
        texts.append(str(raised.value))
    return texts


@iris.spmd(lowering="triton")
def _in_place(x, w):
    x.add_(1)
    return iris.all_gather(x, "tp", dim=0) @ w


def test_what_cannot_be_tuned_says_so(ranks):
    for texts in ranks(2).run(_refused):
        assert texts == [
            "<lambda>: its stages run as torch ops, which have one way\n"
            'help: tune where there is a GPU, or a program with lowering="triton"',
            "_in_place: tune calls the program many times, and it writes to its arguments\n"
            "help: tune a function that returns the new values instead",
        ]
