"""Layers, models and torch.compile on GPU ranks: fused, captured and replayed, against their
unsharded twins.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import iris
from iris.bench.decoder import Block, Decoder, Inputs, Place, Shape, program, rows_of
from iris.bench.torch_decoder import Peer
from iris.nn import (
    Checkpoint,
    ColumnParallelLinear,
    ParallelEmbedding,
    ParallelHead,
    ParallelMLP,
    RMSNorm,
    RowParallelLinear,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
SHAPE = Shape(hidden=256, inner=512, heads=8, layers=2, kv_heads=4, width=64, words=640)


def error(found, want):
    """Relative, in the 2-norm."""
    return float((found.double() - want.double()).norm() / want.double().norm())


def captured(bound):
    """Whether every program of a bound method is a CUDA graph by now."""
    return all(one.runner.captured is not None for one in bound.programs)


def _layers(dtype, spread):
    """Embedding, norm, feed-forward and head, whole or by rows, beside one rank's."""
    ctx = iris.iris(1 << 28)
    device, K, hidden, words = ctx.device, 128, 320, 203  # 203 words do not divide
    torch.manual_seed(0)
    up, gate = (nn.Linear(K, hidden, dtype=dtype, device=device) for _ in range(2))
    down, head = (
        nn.Linear(hidden, K, dtype=dtype, device=device),
        nn.Linear(K, words, dtype=dtype, device=device),
    )
    table, ones = torch.randn(words, K, dtype=dtype, device=device), torch.ones(K, device=device)
    options = {"sequence_parallel": spread}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = ParallelEmbedding.from_weight(table, **options)
            self.norm = RMSNorm.from_weight(ones.to(dtype), 1e-5)
            self.mlp = ParallelMLP.from_linear(up, down, gate, **options)
            self.head = ParallelHead.from_linear(head, gather_output=True, **options)

        def forward(self, ids):
            x = self.embed(ids)
            return self.head(x + self.mlp(self.norm(x)))

    model = iris.spmd(Model())
    worst = 0.0
    with torch.inference_mode():
        for seed in range(6):
            generator = torch.Generator(device).manual_seed(seed)
            ids = torch.randint(0, words, (64,), generator=generator, device=device)
            x = table[ids].double()
            h = F.rms_norm(x, (K,), None, 1e-5)

            def apply(layer, x):
                return F.linear(x, layer.weight.double(), layer.bias.double())

            x = x + apply(down, F.silu(apply(gate, h)) * apply(up, h))
            worst = max(worst, error(model(ids), apply(head, x)))
    return captured(model.forward), worst


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-4)])
@pytest.mark.parametrize("spread", [False, True], ids=["whole", "by rows"])
def test_layers(run, dtype, most, spread):
    for replayed, worst in run(_layers, 2, dtype, spread):
        assert replayed
        assert worst < most


def _decoder(layers, batch, rows, held):
    """A model or a layer as one program, three times and more, with new inputs."""
    ctx = iris.iris(1 << 29)
    place = Place(ctx.cur_rank, ctx.num_ranks, ctx.device, torch.bfloat16)
    module = Decoder(SHAPE, place) if layers else Block(SHAPE, place, 2)
    inputs = Inputs.of(SHAPE, place, batch, rows, held, layers)
    spread = not layers and batch * rows >= 256
    step, found = program(module, inputs, spread), []
    with torch.no_grad():
        for call in range(5):
            inputs.x.copy_(inputs.x.roll(call, 1 if held == 0 else 0))
            x = rows_of(inputs.x, place) if spread else inputs.x
            want, kept = Peer(module, place, "exact", batch * rows, SHAPE.hidden)(*inputs.args)
            y, new = step(x, *inputs.args[1:])
            part = rows_of(want, place) if spread else want
            found.append(max(error(y, part), error(new, kept)))
    torch.cuda.synchronize()
    ctx.watch.check(synchronized=True)
    return captured(step), found


@pytest.mark.parametrize("layers", [0, 2], ids=["layer", "model"])
@pytest.mark.parametrize(
    ("batch", "rows", "held"), [(3, 1, 16), (1, 1, 16), (1, 512, 0), (2, 20, 0)], ids=str
)
def test_decoder_blocks(run, layers, batch, rows, held):
    for replayed, found in run(_decoder, 2, layers, batch, rows, held):
        assert replayed
        assert max(found) < 3e-2


def _compiled():
    """parallelize_module and torch.compile, forward and backward."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    ctx = iris.iris(1 << 28)
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(ctx.device)
    mesh = iris.mesh((ctx.num_ranks,), ("tp",))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(copy.deepcopy(whole), mesh, plan)
    compiled, errors = torch.compile(model, backend="iris"), []
    for rows in (8, 24, 24, 24, 40):
        x = torch.randn(rows, 64, device=ctx.device)
        with torch.no_grad():
            errors.append(error(compiled(x), whole(x)))
    for _ in range(3):
        x = torch.randn(16, 64, device=ctx.device)
        compiled(x).square().sum().backward()
        whole(x).square().sum().backward()
    errors.append(error(model[0].weight.grad.to_local(), _own(whole[0].weight.grad, ctx)))
    stages = {stage for row in iris.explain(compiled).fused for stage, _ in row.stages}
    return max(errors), sorted(stages)


def _own(x, ctx):
    return x.chunk(ctx.num_ranks)[ctx.cur_rank]


def test_torch_compile_and_dtensor(run):
    for worst, stages in run(_compiled, 2):
        assert worst < 1e-3
        assert "matmul_all_reduce" in stages


def _parallelized(kind):
    """A tiny model of transformers: greedy tokens of the unsharded twin in fp32."""
    import transformers

    ctx = iris.iris(1 << 28)
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=160,
        hidden_size=192,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,  # does not divide over two ranks
        head_dim=32,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        sliding_window=None,
    )
    torch.manual_seed(0)
    whole = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in whole.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    whole = whole.eval().to(ctx.device)
    model = iris.parallelize(copy.deepcopy(whole))
    found = []
    for length in (5, 300):
        ids = torch.randint(2, 160, (2, length), device=ctx.device)
        torch.distributed.broadcast(ids_on_host := ids.cpu(), 0)
        ids = ids_on_host.to(ctx.device)
        options = {"max_new_tokens": 8, "do_sample": False}
        mask = torch.ones_like(ids)
        mine = model.generate(ids, attention_mask=mask, **options)
        other = whole.generate(ids, attention_mask=mask, **options)
        found.append(torch.equal(mine, other))
    return found, [one.runner.captured is not None for one in model.spmd.programs]


def test_a_parallelized_model_generates(run):
    pytest.importorskip("transformers")
    for found, replayed in run(_parallelized, 2, "llama"):
        assert found == [True, True]
        assert any(replayed)


def _changed():
    """A block after each change that people make to modules, captured and replayed each time."""
    ctx = iris.iris(1 << 26)
    torch.manual_seed(0)
    up, gate = (nn.Linear(64, 128).requires_grad_(False) for _ in range(2))
    down = nn.Linear(128, 64).requires_grad_(False)
    block = ParallelMLP.from_linear(up, down, gate).to(ctx.device)
    twin = copy.deepcopy(block)
    iris.spmd(block)
    other = {name: torch.rand_like(value) for name, value in block.state_dict().items()}
    changes = [
        lambda mlp: None,
        lambda mlp: mlp.load_state_dict(other),
        lambda mlp: setattr(mlp, "gate", None),
        lambda mlp: mlp.to(torch.bfloat16),
        lambda mlp: mlp.half(),
        lambda mlp: mlp.cpu().float().to(ctx.device),
        lambda mlp: setattr(mlp, "activation", F.gelu),
    ]
    worst = 0.0
    for change in changes:
        for mlp in (block, twin):
            change(mlp)
        for _ in range(4):
            x = torch.randn(16, 64, device=ctx.device).to(block.down.weight.dtype)
            with torch.no_grad():
                worst = max(worst, error(block(x), twin(x)))
    return worst


def test_changes_to_a_block_are_seen(run):
    assert max(run(_changed, 2)) < 2e-2


def _from_a_file(folder):
    ctx = iris.iris(1 << 26)
    stored = Checkpoint.open(folder)
    up = ColumnParallelLinear.from_linear(stored.linear("up"))
    down = RowParallelLinear.from_linear(stored.linear("down"))
    module = iris.spmd(nn.Sequential(up, nn.ReLU(), down).to(ctx.device))
    return [module(torch.full((2, 6), float(n), device=ctx.device)).cpu() for n in range(3)]


def test_layers_from_a_file_move_to_the_gpu(run, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(0)
    whole = {"up.weight": torch.randn(10, 6), "down.weight": torch.randn(6, 10)}
    safetensors.save_file(whole, tmp_path / "a.safetensors")
    for found in run(_from_a_file, 2, tmp_path):
        for n, y in enumerate(found):
            want = F.relu(torch.full((2, 6), float(n)) @ whole["up.weight"].T)
            assert torch.allclose(y, want @ whole["down.weight"].T, rtol=1e-2, atol=1e-2)
