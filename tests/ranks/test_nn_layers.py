"""Parallel layers against their unsharded twins, on worlds that divide their sizes and on worlds
that do not.
"""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import iris
from iris import P
from iris.nn import (
    Checkpoint,
    ColumnParallelLinear,
    KVCache,
    ParallelAttention,
    ParallelEmbedding,
    ParallelHead,
    ParallelMLP,
    RMSNorm,
    RowParallelLinear,
    partition,
)
from iris.testing import assert_close, delay, small_integers

pytestmark = pytest.mark.ranks

WORLDS = [1, 2, 3, 4]
WIDTH, HEADS, KV, HEAD, HIDDEN, WORDS = 24, 9, 3, 8, 50, 37


def linear(rows, columns, seed, dtype, bias=True):
    """A layer of small integers, so that products and sums of them are exact."""
    layer = nn.Linear(columns, rows, bias=bias, dtype=dtype).requires_grad_(False)
    layer.weight.copy_(small_integers((rows, columns), seed=seed, dtype=dtype))
    if bias:
        layer.bias.copy_(small_integers((rows,), seed=seed + 1, dtype=dtype))
    return layer


def _linears(dtype, spread):
    """Column then row, as a program and at once, whole or by rows: the unsharded pair, exactly."""
    ctx = iris.iris(1 << 22)
    up, down = linear(10, 6, 1, dtype), linear(6, 10, 3, dtype)
    module = nn.Sequential(
        ColumnParallelLinear.from_linear(up, sequence_parallel=spread),
        nn.ReLU(),
        RowParallelLinear.from_linear(down, sequence_parallel=spread),
    )
    for seed in range(3):
        x = small_integers((7, 6), seed=seed, dtype=dtype)
        expected = down(F.relu(up(x)))
        start, stop = 0, 7
        if spread:
            chunk = -(-7 // ctx.num_ranks)
            start, stop = min(7, ctx.cur_rank * chunk), min(7, (ctx.cur_rank + 1) * chunk)
        shard = x[start:stop]
        eager = module(shard)
        if seed == 2:
            delay(ctx.num_ranks - 1)
        if not spread:  # shards of x have no spec here, so uneven ones could not be told apart
            module = iris.spmd(module)
            assert_close(module(shard), expected)
        assert_close(eager, expected[start:stop])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("spread", [False, True], ids=["whole", "by rows"])
def test_linear_layers(ranks, world, spread):
    ranks(world).run(_linears, torch.float32, spread)


@pytest.mark.parametrize("lowering", ["torch", "triton"])
def test_gathered_output_and_head(ranks, lowering):
    """Of 37 words over 3 ranks the last has fewer: the ranks' programs are alike all the same."""

    def run(lowering):
        ctx = iris.iris(1 << 22)
        layer = linear(WORDS, 6, 1, torch.float32)
        module = ParallelHead.from_linear(layer, gather_output=True)
        head = iris.spmd(lowering=lowering)(module)
        for seed in range(3):
            x = small_integers((2, 5, 6), seed=seed)
            delay(ctx.num_ranks - 1 if seed == 2 else -1)
            assert_close(head(x), layer(x))
        return iris.explain(head).fused[0].stages

    assert ranks(3).run(run, lowering) == [(("matmul_all_gather", 1),)] * 3


class Decoder(nn.Module):
    """Every layer once, as a model has them."""

    def __init__(self, parts, spread):
        super().__init__()
        embed, norm, qkvo, mlp = parts
        options = {"sequence_parallel": spread}
        self.embed = ParallelEmbedding.from_weight(embed, **options)
        self.norm = RMSNorm.from_weight(norm, 1e-5)
        self.attention = ParallelAttention.from_linear(*qkvo, heads=HEADS, kv_heads=KV)
        self.mlp = ParallelMLP.from_linear(*mlp, **options)

    def forward(self, ids, cos, sin, past=None, mask=None):
        x = self.embed(ids)
        y, kept = self.attention(self.norm(x), cos, sin, past, mask)
        x = x + y
        return iris.all_gather(x + self.mlp(x), "tp", 0, size=10) if x.dim() == 2 else (
            x + self.mlp(x)
        ), kept


def _parts(dtype):
    torch.manual_seed(0)

    def layer(rows, columns):
        return nn.Linear(columns, rows, dtype=dtype).requires_grad_(False)

    qkvo = [layer(n * HEAD, WIDTH) for n in (HEADS, KV, KV)] + [layer(WIDTH, HEADS * HEAD)]
    mlp = layer(HIDDEN, WIDTH), layer(WIDTH, HIDDEN), layer(HIDDEN, WIDTH)
    return torch.randn(WORDS, WIDTH, dtype=dtype), torch.rand(WIDTH, dtype=dtype), qkvo, mlp


def _angles(rows, start=0):
    places = torch.arange(start, start + rows)[:, None] / 10 ** torch.arange(0, 1, 2 / HEAD)
    angles = torch.cat((places, places), -1)
    return angles.cos(), angles.sin()


def _twin(parts, ids):
    """The same decoder on one rank, in plain torch and double precision."""
    embed, weight, (q, k, v, o), (up, down, gate) = parts
    embed, weight = embed.double(), weight.double()

    def apply(layer, x):
        return F.linear(x, layer.weight.double(), layer.bias.double())

    batch, rows = ids.shape
    x = embed[ids]
    h = F.rms_norm(x, (WIDTH,), weight, 1e-5)
    cos, sin = (t.double() for t in _angles(rows))

    def heads(layer, turn):
        y = apply(layer, h).view(batch, rows, -1, HEAD).transpose(1, 2)
        half = torch.cat((-y[..., HEAD // 2 :], y[..., : HEAD // 2]), -1)
        return y * cos + half * sin if turn else y

    found = F.scaled_dot_product_attention(
        heads(q, True), heads(k, True), heads(v, False), is_causal=True, enable_gqa=True
    )
    x = x + apply(o, found.transpose(1, 2).flatten(2))
    return x + apply(down, F.silu(apply(gate, x)) * apply(up, x))


def _decode(dtype, spread):
    """A whole pass, and (not by rows) the same tokens one by one through a cache."""
    iris.iris(1 << 22)
    parts = _parts(dtype)
    module = iris.spmd(Decoder(parts, spread))
    for seed in range(3):
        ids = torch.randint(0, WORDS, (2, 5), generator=torch.Generator().manual_seed(seed))
        expected = _twin(parts, ids)
        cos, sin = (t.to(dtype).expand(2, -1, -1) for t in _angles(5))
        y, kept = module(ids.flatten() if spread else ids, cos, sin)
        close = (
            {"rtol": 0.05, "atol": 0.2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
        )
        torch.testing.assert_close(y.view(expected.shape).double(), expected, **close)
        if spread:
            continue
        cache = KVCache(kept[None])
        cache.append(kept[None], 2)
        for step in range(2, 5):
            cos, sin = (t.to(dtype).expand(2, -1, -1) for t in _angles(1, step))
            mask = torch.zeros(2, 1, 1, cache.capacity + 1, dtype=dtype)
            mask[..., step:-1] = torch.finfo(dtype).min
            y, kept = module(ids[:, step : step + 1], cos, sin, cache.tensor[0], mask)
            cache.append(kept[None], 1)
            torch.testing.assert_close(y[:, 0].double(), expected[:, step], **close)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("spread", [False, True], ids=["whole", "by rows"])
def test_decoder(ranks, world, dtype, spread):
    ranks(world).run(_decode, dtype, spread)


class Adapted(nn.Module):
    """A layer with a low-rank adapter beside it, as LoRA puts them in later."""

    def __init__(self, layer, rank=2):
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(WIDTH, rank, bias=False)
        self.up = partition(nn.Linear(rank, len(layer.weight), bias=False), P("tp", None))

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def _changed():
    """A feed-forward block after each change that people make to models: what it gives at once."""
    iris.iris(1 << 22)
    torch.manual_seed(0)
    up, gate = (nn.Linear(WIDTH, HIDDEN).requires_grad_(False) for _ in range(2))
    down = nn.Linear(HIDDEN, WIDTH).requires_grad_(False)
    block = ParallelMLP.from_linear(up, down, gate)
    twin = copy.deepcopy(block)
    names = list(block.state_dict())
    assert iris.spmd(block) is block
    assert list(block.state_dict()) == names
    seen = []
    other = {name: torch.rand_like(value) for name, value in block.state_dict().items()}

    def adapt(mlp):
        torch.manual_seed(1)
        mlp.up = Adapted(mlp.up)

    changes = {
        "none": lambda mlp: None,
        "new weights": lambda mlp: mlp.load_state_dict(other),
        "hook": lambda mlp: mlp.gate.register_forward_hook(lambda _, args, y: y * 2),
        "hook outside": lambda mlp: mlp.register_forward_hook(lambda *_: seen.append(1)),
        "adapter": adapt,
        "other submodule": lambda mlp: setattr(mlp, "gate", copy.deepcopy(mlp.gate)),
        "activation": lambda mlp: setattr(mlp, "activation", F.gelu),
        "eval": lambda mlp: mlp.eval(),
        "bf16": lambda mlp: mlp.to(torch.bfloat16),
        "half": lambda mlp: mlp.half(),
        "back": lambda mlp: mlp.float(),
    }
    for change in changes.values():
        for mlp in (block, twin):
            change(mlp)
        dtype = block.down.weight.dtype
        for mode in (torch.no_grad, torch.inference_mode):
            for seed in range(3):
                x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)
                with mode():
                    assert_close(block(x), twin(x))
    return len(seen)


def test_changes_to_a_parallel_block_are_seen(ranks):
    assert ranks(3).run(_changed) == [8 * 2 * 3 * 2] * 3


class Cached(nn.Module):
    """Attention as people write it: its keys and values are buffers of one size."""

    def __init__(self, index, parts):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(6 * HEAD, WIDTH, generator=draw) for _ in range(3))
        out = torch.randn(WIDTH, 6 * HEAD, generator=draw)

        def mine(weight, dim):
            return nn.Parameter(weight.chunk(parts, dim)[index].clone(), False)

        self.q, self.k, self.v, self.out = mine(q, 0), mine(k, 0), mine(v, 0), mine(out, 1)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(2, len(self.q) // HEAD, 12, HEAD))

    def part(self, x, at):
        q, k, v = (
            F.linear(x, w).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for w in (self.q, self.k, self.v)
        )
        self.keys[:, :, at], self.values[:, :, at] = k, v
        seen = torch.arange(12) <= at[:, None]
        found = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen)
        return F.linear(found.transpose(1, 2).flatten(2), self.out)

    def forward(self, x, at):
        return iris.all_reduce(self.part(x, at), "tp")


def test_a_cache_in_buffers(ranks):
    """Decoding one row after the other; a step's sum is fused."""

    def run():
        ctx = iris.iris(1 << 22)
        module = iris.spmd(Cached(ctx.cur_rank, ctx.num_ranks))
        twin = Cached(0, 1)
        x = torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(1))
        for start, stop in ((0, 4), *((row, row + 1) for row in range(4, 9))):
            delay(ctx.num_ranks - 1 if start == 6 else -1)
            at, rows = torch.arange(start, stop), x[:, start:stop]
            with torch.inference_mode():
                close = {"rtol": 1e-4, "atol": 1e-4}
                torch.testing.assert_close(module(rows, at), twin.part(rows, at), **close)
        return [row.stages for row in iris.explain(module).fused]

    assert ranks(3).run(run) == [[(("matmul_all_reduce", 1),)] * 2] * 3


def test_key_heads_are_repeated_for_more_ranks(ranks):
    def run():
        ctx = iris.iris(1 << 22)
        q, k, v, o = (linear(n, 6, n, torch.float32) for n in (32, 16, 16, 6))
        o = linear(6, 32, 5, torch.float32)
        layer = ParallelAttention.from_linear(q, k, v, o, heads=4, kv_heads=2)
        held = layer.qkv.shape  # each rank has one query, and the key and value it needs
        return (
            ctx.num_ranks,
            tuple(held),
            layer.qkv[0, 8:16].equal(k.weight[ctx.cur_rank // 2 * 8 :][:8]),
        )

    assert ranks(4).run(run) == [(4, (1, 24, 6), True)] * 4


def _resident(path):
    """Bytes of a file that this process has in its memory."""
    kilobytes, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *rest = line.split()
        if not key.endswith(":"):
            inside = bool(rest) and rest[-1] == str(path)
        elif inside and key == "Rss:":
            kilobytes += int(rest[0])
    return 1024 * kilobytes


def test_no_rank_reads_the_whole_file(ranks, tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"up.weight": torch.zeros(8192, 1024)}, path)

    def run(path):
        iris.iris(1 << 22)
        stored = Checkpoint.open(path)
        layer = ColumnParallelLinear.from_linear(stored.linear("up"))
        return layer.weight.nbytes, _resident(path)

    for held, read in ranks(4).run(run, path):
        assert held == 8 << 20
        assert held <= read <= held + (4 << 20)  # pages are mapped some at a time


def test_only_slices_are_read_from_a_file(ranks, tmp_path):
    whole = {"up.weight": small_integers((10, 6)), "up.bias": small_integers((10,))}
    save_file(whole, tmp_path / "a.safetensors")
    save_file({"down.weight": small_integers((6, 10))}, tmp_path / "b.safetensors")

    def run(folder):
        iris.iris(1 << 22)
        stored = Checkpoint.open(folder)
        up = ColumnParallelLinear.from_linear(stored.linear("up"))
        down = RowParallelLinear.from_linear(stored.linear("down"))
        module = iris.spmd(nn.Sequential(up, nn.ReLU(), down))
        return module(torch.ones(2, 6)), up.weight, up.bias, down.weight

    found = ranks(3).run(run, tmp_path)
    expected = F.relu(whole["up.weight"].sum(1) + whole["up.bias"]) @ small_integers((6, 10)).T
    for y, *_ in found:
        assert_close(y, expected.expand(2, -1))
    assert_close(torch.cat([up for _, up, _, _ in found]), whole["up.weight"])
    assert_close(torch.cat([bias for _, _, bias, _ in found]), whole["up.bias"])
    assert_close(torch.cat([down for *_, down in found], 1), small_integers((6, 10)))


def test_a_missing_tensor_says_what_is_there(tmp_path):
    save_file({"up.weight": torch.ones(2, 2)}, tmp_path / "a.safetensors")
    with pytest.raises(iris.SpecError) as error:
        Checkpoint.open(tmp_path).linear("down")
    assert str(error.value) == (
        "the checkpoint has no tensor 'down.weight'\nhelp: it has up.weight, ..."
    )
