"""Measured choices: agreed on by all ranks, kept on disk, ignored where they are not ours."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import iris
from iris import P
from iris.errors import UnsupportedError
from iris.lower import tuned
from iris.lower.cost import profile_of
from iris.testing import shard, small_integers

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


NO_TIMES = {
    "not json": "not json",
    "list": "[1]",
    "number": '{"a": 3}',
    "text": '{"a": {"fused": "x"}}',
    "too large": f'{{"a": {{"fused": 1{"0" * 400}}}}}',
    "too deep": "[" * 100_000,
}


@pytest.mark.parametrize("text", NO_TIMES.values(), ids=NO_TIMES)
def test_a_file_that_is_not_ours_is_ignored(tmp_path, caplog, text):
    path = Path(tmp_path) / "tuned.json"
    path.write_text(text)
    assert tuned._read(path, tuned._times, {}) == {}
    assert f"{path} is ignored" in caplog.text


MACHINE = replace(profile_of("H200"), name="a machine", units=7, straggle=0.0)


def _profiled(folder):
    """The ranks keep a profile; what they choose by it afterwards, and by a spoilt file."""
    ctx = iris.iris(1 << 22)
    os.environ["IRIS_CACHE_DIR"] = f"{folder}/{ctx.cur_rank}"
    up.forget()
    x, w = _arguments(ctx)
    before = _why(x, w)
    tuned.save_profile(ctx, MACHINE)
    assert tuned.of_group(ctx, ctx.world).profile == MACHINE
    up.forget()
    kept = [len(list(Path(folder).glob(f"{rank}/profile/*.json"))) for rank in range(2)]
    return before, _why(x, w), kept


def test_a_measured_profile_is_what_all_ranks_choose_by(ranks, tmp_path):
    """The first rank's file counts; there is none of another rank."""
    no_model = ("fused", "one kernel computes and communicates", 0)
    found = ("fused", "predicted faster on a machine", 2)
    assert ranks(2).run(_profiled, str(tmp_path)) == [(no_model, found, [1, 0])] * 2
    (file,) = tmp_path.glob("0/profile/*.json")
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert tuned._read(file, tuned._profile, None) == MACHINE


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"bandwidth": 0}, "bandwidth is 0"),
        ({"rates": {"1": 1.0, "2": -1.0, "4": 1.0}}, "rate of 2 is -1.0"),
        ({"link": float("nan")}, "link is nan"),
        ({"units": "many"}, "must be real number, not str"),
        ({"rates": {"2": 1.0}}, "parts of a profile are missing"),
        ({"more": 1}, "unexpected keyword argument 'more'"),
        (None, "parts of a profile are missing"),
    ],
)
def test_a_profile_that_is_not_ours_is_ignored(tmp_path, caplog, change, fault):
    path, content = tmp_path / "profile.json", asdict(MACHINE)
    if change is None:
        del content["straggle"]
    path.write_text(json.dumps(content | (change or {})))
    assert tuned._read(path, tuned._profile, None) is None
    assert f"{path} is ignored" in caplog.text
    assert fault in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away")
def test_another_users_profile_is_ignored(tmp_path, caplog):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(asdict(MACHINE)))
    os.chown(path, 12345, -1)
    assert tuned._read(path, tuned._profile, None) is None
    assert f"{path} is ignored: it belongs to another user" in caplog.text


def _uneven_backward():
    """What rank 0 has measured is of its own shards, and other ranks have smaller ones."""
    ctx = iris.iris(1 << 22)

    @iris.spmd(in_specs=(P(None, "tp"), P("tp")), out_specs=P("tp"), lowering="triton")
    def down(x, w):
        return iris.reduce_scatter(x @ w, "tp")

    x, w = small_integers((4, 5)), small_integers((5, 3), seed=1)
    ways = []
    for _ in range(2):
        shards = shard(x, 1, ctx.cur_rank, 2), shard(w, 0, ctx.cur_rank, 2)
        mine = [part.clone().requires_grad_() for part in shards]
        down(*mine).square().sum().backward()
        due = 2 * (x @ w) @ w.t(), 2 * x.t() @ (x @ w)
        for part, whole, dim in zip(mine, due, (1, 0), strict=True):
            assert torch.equal(part.grad, shard(whole, dim, ctx.cur_rank, 2))
        (program,) = down.programs
        choices = list(program.backward.choices.values())
        ways.append([choice.algorithm for choice in choices])
        for stage in ctx.world.exchange_object("stages", [choice.stage for choice in choices])[0]:
            tuned.of_group(ctx, ctx.world).times[stage] = {"fused": 2.0, "unfused": 1.0}
        down.forget()
    return ways


def test_ranks_of_uneven_shards_run_a_backward_alike(ranks):
    for before, after in ranks(2).run(_uneven_backward):
        assert (before, after) == (["fused"], ["kernel"])


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
