"""A parallelized model does what transformers' own does, or says that it does not."""

import copy

import pytest
import torch

import iris

transformers = pytest.importorskip("transformers")
from tiny_models import tiny  # noqa: E402  (needs transformers)

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

IDS = torch.tensor([[43, 2, 47, 5, 31, 29, 31]])
BATCH = torch.tensor([[0, 0, 0, 7, 8, 9], [2, 3, 4, 5, 6, 7], [0, 4, 3, 2, 11, 12]])
MASK = (BATCH > 0).long()
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])


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
