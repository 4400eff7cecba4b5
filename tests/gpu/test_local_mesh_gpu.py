"""The local mesh on GPU ranks: tensors of the CPU and of a GPU in and out, failures, deaths."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import iris
from iris import P
from iris.bench.mps import share_of
from iris.spmd.local import LocalMesh
from iris.spmd.modules import partition
from iris.testing import assert_close, small_integers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def started(world: int) -> LocalMesh:
    env = {"IRIS_TIMEOUT": "20"}
    if world > torch.cuda.device_count():
        env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(share_of(world))
    return iris.local_mesh(world, "tp", heap_size=1 << 28, env=env)


@pytest.fixture(scope="module", params=[2, 3, 4], ids="world={}".format)
def mesh(request: pytest.FixtureRequest) -> Iterator[LocalMesh]:
    with started(request.param) as mesh:
        yield mesh


def mlp(x, up, down):
    return iris.reduce_scatter(F.relu(iris.all_gather(x, "tp") @ up) @ down, "tp")


def total(x):
    return iris.all_reduce(x.sum(0), "tp")


def linear(mesh):
    return iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))


def sums(mesh):
    return iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P())(total)


def sleep_on_gpu():
    if iris.current().get_rank() == 1:
        torch.cuda._sleep(50_000_000)  # the kernels of the next call wait for it


def test_ranks_take_the_gpus_in_turn(mesh):
    found = mesh.run(lambda: str(iris.current().device))
    assert found == [f"cuda:{rank % torch.cuda.device_count()}" for rank in range(mesh.size)]


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("rows", [64, 37, 1])
def test_global_tensors_in_and_out(mesh, place, rows):
    specs = (P("tp"), P(None, "tp"), P("tp"))
    f = iris.spmd(mesh=mesh, in_specs=specs, out_specs=P("tp"))(mlp)
    for seed in range(5):
        shapes = (rows, 16), (16, 24), (24, 32)
        x, up, down = (small_integers(shape, i, seed) for i, shape in enumerate(shapes))
        mesh.run(sleep_on_gpu)
        y = f(x.to(place), up.t().contiguous().to(place).t(), down.to(place))
        assert y.device.type == place
        assert torch.equal(y.cpu(), F.relu(x @ up) @ down)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_what_a_function_closes_over_comes_to_its_gpu(mesh, place):
    factor, module = torch.tensor([2.0, 3.0, 4.0], device=place), nn.Linear(6, 3).to(place)

    @linear(mesh)
    def f(x):
        return module(x) * factor

    x = small_integers((8, 6))
    with torch.no_grad():
        for step in range(3):
            assert_close(f(x), (module(x.to(place)) * factor).cpu())
            assert_close(f(x.cuda()), module(x.to(place)) * factor)
            module.bias.add_(step)
    for got in mesh.run(lambda: (module.weight, factor * 2)):
        assert torch.equal(got[0].to(place), module.weight)
        assert torch.equal(got[1].to(place), factor * 2)


def test_a_partitioned_module_is_split(mesh):
    module = partition(nn.Linear(6, 8), {"weight": P("tp"), "bias": P("tp")})
    plain, x = nn.Linear(6, 8), torch.randn(3, 6)
    plain.load_state_dict(module.state_dict())
    iris.spmd(mesh=mesh, in_specs=P(), out_specs=P(None, "tp"))(module)
    with torch.no_grad():
        for _ in range(3):
            assert_close(module(x), plain(x))


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_arguments_that_a_program_writes(mesh, place):
    @iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P())
    def update(cache):
        cache.mul_(2)
        return iris.all_gather(cache, "tp")

    cache, ones = torch.arange(6.0, device=place), torch.arange(6.0, device=place)
    for step in range(1, 5):
        assert torch.equal(update(cache), 2**step * ones)
        assert torch.equal(cache, 2**step * ones)


def test_profile_shows_kernels(mesh):
    f, x = sums(mesh), torch.ones(8, 4)
    for _ in range(3):
        f(x)
    with mesh.profile() as timeline:
        f(x)
    assert {rank for rank, track in timeline.tracks() if track == "kernels"} == set(
        range(mesh.size)
    )
    assert timeline.names(-1) == ["call total"]


def test_errors_leave_the_mesh_usable(mesh):
    @linear(mesh)
    def wrong(x):
        return x @ torch.ones(3, 3, device=x.device)

    for _ in range(2):
        with pytest.raises(iris.LaunchError, match=r"x @ torch\.ones") as caught:
            wrong(torch.ones(12, 4))
        assert str(caught.value).count("in wrong") == 1
        assert torch.equal(sums(mesh)(torch.ones(8, 2)), torch.full((2,), 8.0))


def test_interrupt_leaves_the_mesh_usable(mesh):
    def hang():
        if iris.current().get_rank() == 0:
            time.sleep(60)
        iris.all_reduce(torch.ones(1, device=iris.current().device))
        iris.synchronize()

    pids = mesh.pids
    threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        mesh.run(hang)
    assert torch.equal(sums(mesh)(torch.ones(8, 2)), torch.full((2,), 8.0))
    assert mesh.pids == pids


def test_a_dead_rank_is_named():
    with closing(started(2)) as mesh:
        f, x = sums(mesh), torch.ones(4, 2).cuda()
        before = f(x)
        os.kill(mesh.pids[1], signal.SIGKILL)
        with pytest.raises(iris.LaunchError, match="rank 1: was killed by SIGKILL"):
            f(x)
        with pytest.raises(iris.PeerError, match="rank 1 was killed by SIGKILL"):
            f(x)
        mesh.restart()
        assert torch.equal(f(x), before)
        pids = mesh.pids
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
