"""Gradients of programs on GPU ranks, captured and replayed, against autograd on one rank."""

import pytest
import torch
import torch.nn.functional as F

import iris
from iris import P

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def shard(x, dim, index, parts):
    chunk = -(-x.shape[dim] // parts)
    start = min(index * chunk, x.shape[dim])
    return x.narrow(dim, start, max(0, min(chunk, x.shape[dim] - start)))


def leaf(x):
    return x.detach().clone().requires_grad_()


def _block(rows, dtype):
    """Attention by heads and a feed-forward part, five times with new data."""
    ctx = iris.iris(1 << 28)
    rank, world = ctx.cur_rank, ctx.num_ranks

    def heads(t):
        return t.view(t.shape[0], -1, 64).transpose(0, 1).unsqueeze(0)

    def attend(q, k, v):
        return F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True)

    def mix(h, w):
        attended = attend(h @ w["q"], h @ w["k"], h @ w["v"]).squeeze(0).transpose(0, 1)
        return attended.reshape(h.shape[0], -1)

    specs = {"q": P(None, "tp"), "k": P(None, "tp"), "v": P(None, "tp"), "norm": P()}
    specs |= {"out": P("tp"), "up": P(None, "tp"), "down": P("tp")}

    @iris.spmd(in_specs=(P("tp"), specs), out_specs=P("tp"))
    def block(x, w):
        h = iris.all_gather(F.rms_norm(x, x.shape[-1:], w["norm"]), "tp")
        x = x + iris.reduce_scatter(mix(h, w) @ w["out"], "tp")
        h = iris.all_gather(F.rms_norm(x, x.shape[-1:], w["norm"]), "tp")
        return x + iris.reduce_scatter(F.silu(h @ w["up"]) @ w["down"], "tp")

    def alone(x, w):
        x = x + mix(F.rms_norm(x, x.shape[-1:], w["norm"]), w) @ w["out"]
        return x + F.silu(F.rms_norm(x, x.shape[-1:], w["norm"]) @ w["up"]) @ w["down"]

    wide = 64 * 4 * world
    shapes = {"q": (256, wide), "k": (256, wide), "v": (256, wide), "norm": (256,)}
    shapes |= {"out": (wide, 256), "up": (256, 512), "down": (512, 256)}
    dims = {"q": 1, "k": 1, "v": 1, "out": 0, "up": 1, "down": 0}
    worst = 0.0
    for seed in range(5):
        torch.manual_seed(seed)
        make = lambda *s: torch.randn(s, device=ctx.device).to(dtype)  # noqa: E731
        x, grad = leaf(make(rows, 256)), make(rows, 256)
        whole = {n: leaf(make(*s) * s[0] ** -0.5) for n, s in shapes.items()}
        alone(x, whole).backward(grad)
        mine = {
            n: leaf(shard(t, dims[n], rank, world) if n in dims else t) for n, t in whole.items()
        }
        part = leaf(shard(x, 0, rank, world))
        block(part, mine).backward(shard(grad, 0, rank, world))
        pairs = [(part.grad, shard(x.grad, 0, rank, world))]
        for name, t in whole.items():
            due = shard(t.grad, dims[name], rank, world) if name in dims else t.grad
            pairs.append((mine[name].grad, due))
        for got, due in pairs:
            if due.numel():
                scale = due.double().abs().max()
                worst = max(worst, ((got.double() - due.double()).abs().max() / scale).item())
    return worst


@pytest.mark.parametrize(("world", "rows"), [(1, 128), (2, 256), (2, 129), (4, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block(run, world, rows, dtype):
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 4e-2}[dtype]
    for worst in run(_block, world, rows, dtype):
        assert worst < tolerance
