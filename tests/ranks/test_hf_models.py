"""A parallelized model does what transformers' own does, or says that it does not."""

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch

import iris
from iris.hf.parallel import FAMILY

transformers = pytest.importorskip("transformers")
from tiny_models import KINDS, tiny  # noqa: E402  (needs transformers)

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

IDS = torch.tensor([[43, 2, 47, 5, 31, 29, 31]])
BATCH = torch.tensor([[0, 0, 0, 7, 8, 9], [2, 3, 4, 5, 6, 7], [0, 4, 3, 2, 11, 12]])
MASK = (BATCH > 0).long()
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])


PAGE = Path(__file__).parents[2] / "docs/how-to/hugging-face.md"


def speak(model, ids=IDS, mask=None, **options):
    """Six greedy tokens more."""
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"max_new_tokens": 6, "do_sample": False} | options
    return model.generate(ids, attention_mask=mask, **options)


def turns(model):
    """A second turn of a talk, on the cache of the first."""
    first = speak(model, return_dict_in_generate=True)
    more = torch.cat((first.sequences, IDS[:, :3]), 1)
    return speak(model, more, cache=first.cache)


def one_cache(model):
    """A cache made by the caller is filled where it is."""
    cache = transformers.DynamicCache(config=model.config)
    return [
        model(IDS[:, :4], cache=cache).logits,
        model(IDS[:, 4:6], cache=cache, use_cache=False).logits,
        model(IDS[:, 6:], cache=cache).logits,
        cache.get_seq_length(),
    ]


def batches(model):
    """Entries of a cache repeated, chosen, copied, cropped, forgotten."""
    cache = model(BATCH).cache
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3, 5]))
    other = copy.deepcopy(cache)
    found = [model(BATCH[:, :2], cache=cache).logits, model(BATCH[:, 2:4], cache=other).logits]
    cache.reset()
    return [*found, cache.get_seq_length(), model(IDS, cache=cache).logits]


def compiled(model):
    """What transformers compiles by itself, for a cache that promises not to change."""
    how = transformers.CompileConfig(backend="eager", fullgraph=False)
    how._compile_all_devices = True
    return speak(model, BATCH, MASK, cache_implementation="static", compile_config=how)


def draw(model):
    torch.manual_seed(5)
    return speak(model, do_sample=True, temperature=1.5, num_return_sequences=2)


def loss(model):
    ids, mask = BATCH.flip(1), MASK.flip(1)  # padded on the right
    found = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    return found.loss, found.logits.view(-1, 61)[mask.flatten() > 0]


USES = {
    "static": lambda m: speak(m, BATCH, MASK, cache_implementation="static"),
    "static beams": lambda m: speak(m, BATCH, MASK, num_beams=2, cache_implementation="static"),
    "a static cache": lambda m: speak(
        m, BATCH, MASK, cache=transformers.StaticCache(config=m.config, max_cache_len=32)
    ),
    "compiled": compiled,
    "turns": turns,
    "one cache": one_cache,
    "batches": batches,
    "no cache": lambda m: speak(m, use_cache=False),
    "packed": lambda m: m(IDS, position_ids=PACKED, use_cache=False).logits,
    "loss": loss,
}
MORE = {
    "draws": draw,
    "prompt lookup": lambda m: speak(m, IDS.repeat(1, 2), prompt_lookup_num_tokens=3),
    "guided": lambda m: speak(m, guidance_scale=1.5),
    "pieces of a prompt": lambda m: speak(m, IDS.repeat(1, 2), prefill_chunk_size=4),
    "penalties": lambda m: speak(m, repetition_penalty=1.7, no_repeat_ngram_size=2),
}


def used(kind, names, parallel):
    if parallel:
        iris.iris(1 << 24)
    model = tiny(kind, 4, 2, num_hidden_layers=2)
    model = iris.parallelize(model) if parallel else model
    with torch.no_grad():
        return {name: (USES | MORE)[name](model) for name in names}


def check_uses(ranks, kind, names):
    expected = used(kind, names - {"compiled"}, False)
    expected["compiled"] = expected["static"]
    for found in ranks(2).run(used, kind, [*names], True, timeout=280):
        for name in names:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["gemma2", pytest.param("llama", marks=pytest.mark.slow)])
def test_what_a_model_is_used_for(ranks, kind):
    check_uses(ranks, kind, USES.keys())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ways_to_choose_tokens(ranks):
    check_uses(ranks, "llama", MORE.keys() | {"static"})


def _refused(name):
    iris.iris(1 << 24)
    model = iris.parallelize(tiny("llama", 4, 2))
    with pytest.raises(iris.IrisError) as error, torch.no_grad():
        REFUSED[name][0](model)
    return str(error.value)


TAKES = "\nhelp: it takes input_ids, attention_mask, position_ids, labels, logits_to_keep and cache"
MASKS = "\nhelp: it is 1 for tokens and 0 for padding, of the past too"
FULL = "\nhelp: pass no cache at first, or an empty one, and then the same again"


def flagged(model):
    model.config.output_hidden_states = True
    model(IDS)


def dropping(model):
    model.config.attention_dropout = 0.5
    model.train()(IDS)


def hooked(model):
    model.model.register_forward_hook(lambda *_: None)
    model(IDS)


def full(model):
    cache = tiny("llama", 4, 2)(IDS).cache
    model(IDS, cache=cache)


REFUSED = {
    "embeddings": (
        lambda m: m(inputs_embeds=torch.ones(1, 2, 32)),
        "a parallelized model does not take inputs_embeds" + TAKES,
    ),
    "nothing": (lambda m: m(), "a parallelized model does not take no input_ids" + TAKES),
    "hidden states": (flagged, "a parallelized model does not take output_hidden_states" + TAKES),
    "the inner model": (
        lambda m: m.model(IDS),
        "LlamaModel runs as a part of a parallelized model only\n"
        "help: call the model, which gives logits",
    ),
    "its hooks": (
        hooked,
        "hooks of LlamaModel would not be called in a parallelized model\n"
        "help: set them on the model or on layers",
    ),
    "dropout": (
        dropping,
        "a parallelized model has no dropout\nhelp: set config.attention_dropout = 0",
    ),
    "a mask of pairs": (
        lambda m: m(IDS, attention_mask=torch.ones(1, 1, 7, 7)),
        "attention_mask is [1, 1, 7, 7], where [batch, past + rows] is [1, 7]" + MASKS,
    ),
    "masks by kind": (
        lambda m: m(IDS, attention_mask={"full_attention": None}),
        "attention_mask is a dict, where [batch, past + rows] is [1, 7]" + MASKS,
    ),
    "a mask of new rows": (
        lambda m: m(IDS, cache=m(IDS).cache, attention_mask=torch.ones(1, 7)),
        "attention_mask is [1, 7], where [batch, past + rows] is [1, 14]" + MASKS,
    ),
    "one dim": (lambda m: m(IDS[0]), "input_ids are [7], not [batch, rows] of one or more"),
    "no rows": (lambda m: m(IDS[:, :0]), "input_ids are [1, 0], not [batch, rows] of one or more"),
    "an unknown token": (
        lambda m: m(IDS + 20),
        "token 63 is not one of the 61 words of the model",
    ),
    "another batch": (
        lambda m: m(BATCH, cache=m(IDS).cache),
        "the cache holds 3 layers of a batch of 1, this call has 3 of a batch of 3",
    ),
    "a tuple": (
        lambda m: m(IDS, cache=(IDS,)),
        "a tuple is no cache of transformers" + FULL,
    ),
    "whole heads": (
        full,
        "a DynamicCache that holds keys of whole heads cannot be split over ranks" + FULL,
    ),
    "keys from outside": (
        lambda m: m(IDS).cache.update(IDS, IDS, 0),
        "a parallelized model's cache takes no keys from outside" + FULL,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_parallelized_model_refuses(ranks, name):
    assert ranks(2).run(_refused, name) == [REFUSED[name][1]] * 2


def _trained(kind, heads, ids, rate, parallel):
    """Losses of two steps, and the weights after them."""
    if parallel:
        iris.iris(1 << 24)
    model = tiny(kind, heads, 3 if heads == 9 else 2, num_hidden_layers=2).train()
    model.lm_head.weight.data *= 0.2  # else the loss of random weights is all but constant
    model = iris.parallelize(model) if parallel else model
    optimiser, losses = torch.optim.SGD(model.parameters(), lr=rate), []
    for _ in range(2):
        optimiser.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return losses, iris.hf.whole_state_dict(model) if parallel else model.state_dict()


@pytest.mark.parametrize(
    ("kind", "heads", "rows", "world"),
    [
        ("qwen3", 4, 7, 2),
        pytest.param("llama", 9, 7, 2, marks=pytest.mark.slow),
        pytest.param("llama", 9, 130, 3, marks=pytest.mark.slow),
        pytest.param("gemma3_text", 4, 130, 2, marks=pytest.mark.slow),
    ],
)
def test_two_steps_of_training_are_those_of_one_process(ranks, kind, heads, rows, world):
    ids = torch.randint(2, 61, (2, rows), generator=torch.Generator().manual_seed(3))
    losses, weights = _trained(kind, heads, ids, 0.1, False)
    start = tiny(kind, heads, 3 if heads == 9 else 2, num_hidden_layers=2).state_dict()
    close = {"rtol": 1e-3, "atol": 1e-4}
    for found, held in ranks(world).run(_trained, kind, heads, ids, 0.1, True, timeout=110):
        torch.testing.assert_close(found, losses, **close)
        for name, weight in held.items():
            assert not torch.equal(weight, start[name]), name
            torch.testing.assert_close(weight, weights[name], msg=name, **close)


def _kept(folder):
    """Logits of a model, and of what was saved, read, copied or pickled of it."""
    iris.iris(1 << 24)
    model = tiny("qwen2", 4, 2)
    model = iris.parallelize(model, plan=model.tp_plan)
    model.save_pretrained(folder, max_shard_size="20KB")
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(model.config)
    read = iris.parallelize(empty.eval(), weights=iris.nn.Checkpoint.open(folder))
    kinds = (model, whole, read, copy.deepcopy(model), pickle.loads(pickle.dumps(model)))
    with torch.no_grad():
        return [one(IDS).logits for one in kinds], len([*folder.glob("*.safetensors")])


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_model_is_saved_whole_and_read_in_shards(ranks, world, tmp_path):
    with torch.no_grad():
        expected = tiny("qwen2", 4, 2)(IDS).logits
    for found, files in ranks(world).run(_kept, tmp_path):
        assert files > 1
        for logits in found:
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_few_words_and_another_dtype(ranks):
    """Words that do not reach all ranks; an embedding's scale is rounded as the model is."""

    def run():
        iris.iris(1 << 24)
        model = tiny("gemma", 5, 1, vocab_size=5, pad_token_id=None)
        twin, ids = copy.deepcopy(model).bfloat16(), IDS % 5
        model = iris.parallelize(model).bfloat16()
        found = model.get_input_embeddings()(ids), twin.get_input_embeddings()(ids)
        assert torch.equal(*found)
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, twin(ids).logits, rtol=0.1, atol=0.3)

    ranks(4).run(run)


def repeated(training):
    def call():
        model = iris.parallelize(tiny("llama", 2, 1)).train(training)
        with torch.enable_grad():
            model(IDS)  # without training, key heads want no gradient
            if not training:
                raise iris.UnsupportedError("none")

    return call


def adapted():
    model = tiny("llama", 4, 2)
    for layer in model.model.layers:
        layer.self_attn.q_proj = torch.nn.Sequential(layer.self_attn.q_proj)
        layer.mlp.register_forward_hook(lambda *_: None)
        layer.mlp.up_proj.weight = torch.nn.Parameter(torch.ones(50, 32).char(), False)
    iris.parallelize(model)


def recomputed():
    model = tiny("llama", 4, 2)
    model.model.gradient_checkpointing = True
    iris.parallelize(model)


def on_meta():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(tiny("llama", 4, 2).config)
    iris.parallelize(model)


OUT = "\nhelp: merge adapters, do not quantise, and set hooks when the model is parallelized"
UNCUT = {
    "adapters": (
        adapted,
        "this LlamaForCausalLM cannot be cut:\n"
        "  model.layers.*.self_attn.q_proj is no plain linear layer but a Sequential\n"
        "  model.layers.*.mlp has hooks\n"
        "  model.layers.*.mlp.up_proj is no plain linear layer but a Linear of Parameter "
        "torch.int8" + OUT,
    ),
    "activations": (
        recomputed,
        "this LlamaForCausalLM cannot be cut:\n"
        "  activations are to be computed again for gradients" + OUT,
    ),
    "on meta": (
        on_meta,
        "this LlamaForCausalLM cannot be cut:\n"
        "  it is on the device meta, and no weights are given" + OUT,
    ),
    "no layers": (
        lambda: iris.parallelize(tiny("llama", 4, 2, num_hidden_layers=0)),
        "this LlamaForCausalLM cannot be cut:\n  it has no layers" + OUT,
    ),
    "a name for a mesh": (
        lambda: iris.parallelize(tiny("llama", 4, 2), mesh="tp"),
        "mesh is a str\nhelp: use iris.mesh(shape, names)",
    ),
    "an empty plan": (
        lambda: iris.parallelize(tiny("llama", 4, 2, num_hidden_layers=1), plan={}),
        "the plan does not split LlamaForCausalLM as it must be:\n"
        + "".join(f"  layers.*.self_attn.{part}_proj: not split, not colwise\n" for part in "qkv")
        + "  layers.*.self_attn.o_proj: not split, not rowwise\n"
        "  layers.*.mlp.gate_proj: not split, not colwise\n"
        "  layers.*.mlp.up_proj: not split, not colwise\n"
        "  layers.*.mlp.down_proj: not split, not rowwise\n"
        'help: plan="auto" is the model\'s own',
    ),
    "half a plan": (
        lambda: iris.parallelize(tiny("llama", 4, 2), plan={"model.layers.*_proj": "colwise"}),
        "the plan does not split LlamaForCausalLM as it must be:\n"
        "  layers.*.self_attn.o_proj: colwise, not rowwise\n"
        "  layers.*.mlp.down_proj: colwise, not rowwise\n"
        'help: plan="auto" is the model\'s own',
    ),
    "repeated heads": (
        repeated(True),
        "there are no gradients where key heads are repeated over ranks\n"
        "help: train on ranks that divide the key heads, or call model.eval()",
    ),
    "repeated heads, at rest": (repeated(False), "none"),
}


@pytest.mark.parametrize("name", UNCUT)
def test_models_that_are_not_parallelized(ranks, name):
    def run(name):
        iris.iris(1 << 24)
        with pytest.raises(iris.IrisError) as error:
            UNCUT[name][0]()
        return str(error.value)

    assert ranks(2).run(run, name) == [UNCUT[name][1]] * 2


ANGLES = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [3.0, 2.0, 1.5, 4.0]},
}


def _turned(kind, ids, parallel):
    if parallel:
        iris.iris(1 << 24)
    angles = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 16}
    options = {"max_position_embeddings": 32, "rope_parameters": angles | ANGLES[kind]}
    model = tiny("llama", 4, 2, num_hidden_layers=2, **options)
    model = iris.parallelize(model) if parallel else model
    with torch.no_grad():
        return model(ids).logits, model(ids[:, :7]).logits, speak(model, ids)


@pytest.mark.parametrize(
    "kind",
    [one if one == "dynamic" else pytest.param(one, marks=pytest.mark.slow) for one in ANGLES],
)
def test_every_kind_of_rotary_scaling(ranks, kind):
    ids = torch.randint(2, 61, (1, 24), generator=torch.Generator().manual_seed(1))
    expected = _turned(kind, ids, False)
    for found in ranks(2).run(_turned, kind, ids, True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_page_lists_the_models_that_are_known_and_tested():
    """`test_generate.test_other_models_of_the_family` runs all of `KINDS`."""
    listed = re.findall(r"^\| .* \| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert listed == [*FAMILY]
    assert {*listed} == {*KINDS}


@pytest.mark.parametrize(
    "kind",
    ["mixtral", "qwen3_moe", "phi3", "cohere", "stablelm", "olmo2", "gpt_neox", "gpt2", "bert"],
)
def test_other_forms_are_refused(kind):
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(kind)
        config.num_hidden_layers = 1
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(iris.UnsupportedError) as error:
        iris.parallelize(model)
    assert str(error.value) == (
        f"iris.parallelize does not know the form of {type(model).__name__} ({kind})\n"
        f"help: it knows causal language models of {', '.join(FAMILY)}; others: iris.nn"
    )
