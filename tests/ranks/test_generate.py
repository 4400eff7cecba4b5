"""Models of transformers over ranks: the tokens and logits of one process, whatever divides and
whatever does not.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_models import KINDS, ask, check, tiny

import iris
from iris.generate import __main__ as command, models, worker

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
SLOW = ("llama", "mistral", "ministral", "qwen2", "smollm3", "gemma", "olmo", "seed_oss")


def slow(values):
    """A case that `make test` leaves out: it takes ten seconds or more."""
    many = values if isinstance(values, tuple) else (values,)
    return pytest.param(*many, marks=pytest.mark.slow)


def _tiny(kind, heads, kv_heads, prompts):
    iris.iris(1 << 24)
    model = iris.parallelize(tiny(kind, heads, kv_heads))
    return [ask(model, *prompt) for prompt in prompts]


def prompts():
    """Short, longer, a batch padded on the left, and one whose rows are split over ranks."""
    draw = torch.Generator().manual_seed(1)
    shapes = ((1, 5), (1, 33), (2, 9), (2, 130))
    ids = [torch.randint(2, 61, shape, generator=draw) for shape in shapes]
    mask = torch.ones_like(ids[2])
    mask[0, :4] = ids[2][0, :4] = 0
    return [(ids[0], None), (ids[1], None), (ids[2], mask), (ids[3], None)]


@pytest.mark.parametrize("world", [slow(1), 2, slow(3), slow(4)])
def test_heads_that_do_not_divide(ranks, world):
    expected = [ask(tiny("llama"), *prompt) for prompt in prompts()]
    check(ranks(world).run(_tiny, "llama", 9, 3, prompts(), timeout=110), expected)


@pytest.mark.parametrize("kind", [slow(kind) if kind in SLOW else kind for kind in KINDS])
@pytest.mark.parametrize("world", [2, slow(4)])
def test_other_models_of_the_family(ranks, kind, world):
    asked = prompts()[1:3]  # longer than the windows, and padded
    expected = [ask(tiny(kind, 4, 2), *prompt) for prompt in asked]
    # On four ranks the two key heads are repeated.
    check(ranks(world).run(_tiny, kind, 4, 2, asked, timeout=110), expected)


def test_sampling_beams_and_caches_across_calls(ranks):
    ids = prompts()[0][0]

    def run(ids, parallel):
        if parallel:
            iris.iris(1 << 24)
        model = iris.parallelize(tiny("llama")) if parallel else tiny("llama")
        torch.manual_seed(7)
        sampled = ask(model, ids, do_sample=True, temperature=1.5)
        beams = ask(model, ids, num_beams=3)[0]
        with torch.no_grad():
            whole = model(ids).logits
            first = model(ids[:, :3])
            rest = model(ids[:, 3:], cache=first.cache).logits
        torch.testing.assert_close(rest, whole[:, 3:], rtol=1e-4, atol=1e-4)
        return sampled, beams

    expected = run(ids, False)
    for sampled, beams in ranks(2).run(run, ids, True, timeout=110):
        check([[sampled]], [expected[0]])
        assert torch.equal(beams, expected[1])


def test_ranks_with_other_prompts_are_told(ranks):
    def run():
        ctx = iris.iris(1 << 24)
        model = iris.parallelize(tiny("llama"))
        with pytest.raises(iris.CollectiveMismatchError) as error:
            model.generate(torch.tensor([[3, 4 + ctx.cur_rank]]), max_new_tokens=2)
        return re.sub(r"\(\w+\)", "(NUMBER)", str(error.value))

    assert (
        ranks(2).run(run)
        == [
            "ranks of one group are in different calls\n"
            "  rank 0: LlamaForCausalLM on 1x2 tokens ending in [3, 4] (NUMBER)\n"
            "  rank 1: LlamaForCausalLM on 1x2 tokens ending in [3, 5] (NUMBER)\n"
            "help: every rank of a group must make the same calls, with the same shapes and dtypes"
        ]
        * 2
    )


@pytest.mark.slow
def test_pairs_of_ranks_have_prompts_of_their_own(ranks):
    """A mesh of two axes: each pair has the whole model, and its own batch."""
    ids = prompts()[3][0][:, :20]

    def run(ids):
        ctx = iris.iris(1 << 24)
        model = iris.parallelize(tiny("llama", 4, 2), iris.mesh((2, 2), ("dp", "tp")))
        return [ask(model, ids[ctx.cur_rank // 2 :][:1])]

    alone = [ask(tiny("llama", 4, 2), ids[pair:][:1]) for pair in range(2)]
    for rank, found in enumerate(ranks(4).run(run, ids, timeout=110)):
        check([found], [alone[rank // 2]])


def test_explain_counts_every_collective(ranks):
    def run(prompts):
        iris.iris(1 << 24)
        model = iris.parallelize(tiny("llama"))
        for ids in prompts:
            ask(model, ids, tokens=2)
        return iris.explain(model)

    summary = ranks(3).run(run, [prompts()[0][0], prompts()[3][0]], timeout=110)[0]
    counts = {(row.program, row.collective): (row.fused, row.total) for row in summary.fused}
    assert counts == {  # two sums a layer and the embedding's; the gather of logits
        ("prefill 1x16", "all_reduce"): (7, 7),
        ("prefill 1x16", "all_gather"): (1, 1),
        ("decode 1x1, cache of 64", "all_reduce"): (7, 7),
        ("decode 1x1, cache of 64", "all_gather"): (1, 1),
        # rows are split: two gathers a layer, one before the last rows are picked
        ("prefill 2x256", "reduce_scatter"): (6, 7),
        ("prefill 2x256", "all_gather"): (7, 8),
        ("decode 2x1, cache of 256", "all_reduce"): (7, 7),
        ("decode 2x1, cache of 256", "all_gather"): (1, 1),
    }
    reasons = {(entry.collective, entry.count): entry.reason for entry in summary.alone}
    assert "comes from embedding" in reasons["reduce_scatter", 1]
    assert "is read by index_select" in reasons["all_gather", 1]
    assert "decode 2x1, cache of 256" in str(summary)


def test_layers_of_one_form_are_traced_once(ranks):
    def run(ids):
        iris.iris(1 << 24)
        model = iris.parallelize(tiny("llama"))
        calls = []
        first, _, third = model.model.layers
        for layer in model.model.layers:
            layer.mlp.register_forward_hook(count := lambda *_: calls.append(1))
        hooks = first.mlp._forward_hooks
        for layer in model.model.layers:
            layer.mlp._forward_hooks = hooks
        with torch.no_grad():
            model(ids)
        alike = len(calls)
        third.mlp._forward_hooks = {-1: count, **hooks}  # a layer of another form
        with torch.no_grad():
            model(ids[:, :1])
        return alike, len(calls) - alike

    assert ranks(1).run(run, prompts()[0][0], timeout=110) == [(1, 3)]


REFUSED = {
    "another form": (
        lambda: iris.parallelize(torch.nn.Linear(2, 2)),
        "iris.parallelize does not know the form of Linear (Linear)\n"
        "help: it knows causal language models of llama, mistral, ministral, qwen2, qwen3, "
        "smollm3, gemma, gemma2, gemma3_text, granite, olmo, seed_oss; others: iris.nn",
    ),
    "rows after": (
        lambda: iris.parallelize(tiny("gemma3_text", use_bidirectional_attention=True)),
        "Gemma3ForCausalLM looks at rows that come after",
    ),
    "clipped": (
        lambda: iris.parallelize(tiny("olmo", clip_qkv=1.0)),
        "OlmoForCausalLM clips queries, keys and values",
    ),
    "no plan": (
        lambda: iris.parallelize(tiny("llama"), plan="columns"),
        "plan 'columns' is not known\nhelp: pass \"auto\" or a dict of styles",
    ),
    "half a plan": (
        lambda: iris.parallelize(
            tiny("llama"),
            plan={"layers.*.self_attn.?_proj": "colwise", "layers.*.mlp.*": "rowwise"},
        ),
        "the plan does not split LlamaForCausalLM as it must be:\n"
        "  layers.*.self_attn.o_proj: colwise, not rowwise\n"
        "  layers.*.mlp.gate_proj: rowwise, not colwise\n"
        "  layers.*.mlp.up_proj: rowwise, not colwise\n"
        'help: plan="auto" is the model\'s own',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    call, text = REFUSED[name]
    with pytest.raises(iris.IrisError) as error:
        call()
    assert str(error.value) == text


@pytest.fixture(scope="module")
def smollm2():
    """The real model to build, its chat prompts, and the same model on one process."""
    model, encode = models.load("smollm2")
    whole = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval()
    names = [name for name in whole.state_dict() if name != "lm_head.weight"]
    whole.load_state_dict({name: model.weights[name][:] for name in names}, strict=False)
    return model, encode, whole


QUESTIONS = (
    "What is the capital of France?",
    "Hi!",
    "Count from one to ten.",
    "Why is the sky blue?",
    "Write a line about the sea.",
    "2 + 2 =",
    "Name three colours.",
    "Translate 'good morning' into French.",
    "Who wrote Hamlet?",
    "What does a compiler do? Answer at length, with an example, please, and a joke at the end.",
)


def _real(model, prompts, tokens):
    iris.iris(1 << 28)
    torch.set_num_threads(1)
    built = model.build()
    return [ask(built, ids, tokens=tokens) for ids in prompts]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world", "count"), [(2, 1), slow((3, 10)), slow((4, 2)), slow((1, 2))])
def test_a_real_model(ranks, smollm2, world, count):
    model, encode, whole = smollm2
    asked = [torch.tensor([encode(text)]) for text in QUESTIONS[:count]]
    expected = [ask(whole, ids, tokens=5) for ids in asked]
    check(ranks(world).run(_real, model, asked, 5, timeout=580), expected, close=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_command_streams(smollm2, monkeypatch, capfd):
    model, encode, _ = smollm2
    monkeypatch.setattr(models, "load", lambda name: (model, encode))
    prompt = "What is the capital of France?"
    assert command.main(["--ranks", "2", "--tokens", "12", "--prompt", prompt]) == 0
    shown = capfd.readouterr().out
    assert "The capital of France is Paris.\n" in shown
    assert "61 of 61" in shown
    assert "7 tokens, " in shown


@pytest.fixture
def folder(tmp_path):
    """A tiny model and its tokenizer as files: word ``wN`` is token N."""
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{number}": number for number in range(61)}, unk_token="w0")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    whole = tiny("qwen3", 4, 2, tie_word_embeddings=False)
    whole.save_pretrained(tmp_path)
    return tmp_path, whole


def words_of(tokens):
    return " ".join(f"w{token}" for token in tokens)


def test_a_folder_of_safetensors(folder, capfd):
    path, whole = folder
    options = ["--model", str(path), "--ranks", "3", "--tokens", "5"]
    assert command.main([*options, "--prompt", "w7 w8 w9"]) == 0
    alone = ask(whole, torch.tensor([[7, 8, 9]]), tokens=5)[0][0, 3:].tolist()
    assert words_of(alone) in capfd.readouterr().out
    assert command.main([*options, "--prompt", ""]) == 1
    assert "the prompt has no tokens" in capfd.readouterr().out


def test_a_chat_template_is_used_unless_the_prompt_is_raw(folder):
    path, _ = folder
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = (
        "{% for m in messages %}w1 {{ m['content'] }} w2 {% endfor %}"
        "{% if add_generation_prompt %}w3{% endif %}"
    )
    tokenizer.save_pretrained(path)
    _, encode = models.load(str(path))
    assert encode("w7 w8") == [1, 7, 8, 2, 3]
    assert encode("w7 w8", False) == [7, 8]


def _spoken(pool, path, prompts, settings):
    """What every rank says; it is the same."""
    model, encode = models.load(str(path))
    tokens = [encode(prompt) for prompt in prompts]
    first, *others = pool.run(worker.run, model, tokens, settings, timeout=110)
    assert all((other.tokens, other.texts) == (first.tokens, first.texts) for other in others)
    return first


def test_a_batch_of_different_lengths_stops_where_it_should(ranks, folder):
    path, whole = folder
    asked = [[7, 8, 9], [5], [4, 3, 2, 11, 12]]
    alone = [ask(whole, torch.tensor([one]), tokens=6)[0][0, len(one) :].tolist() for one in asked]
    stop = f"w{alone[1][3]}"
    settings = worker.Settings(tokens=6, stop=(stop,), aloud=False)
    found = _spoken(ranks(2), path, [words_of(one) for one in asked], settings)
    for text, tokens in zip(found.texts, alone, strict=True):
        assert text == words_of(tokens).partition(stop)[0]


def test_draws_are_the_same_on_all_ranks_and_by_seed(ranks, folder):
    path, _ = folder
    said = [
        _spoken(
            ranks(2), path, ["w7 w8", "w3"], worker.Settings(tokens=8, temperature=2.0, seed=seed)
        )
        for seed in (1, 1, 2)
    ]
    assert said[0].tokens == said[1].tokens != said[2].tokens


def test_an_interrupt_leaves_nothing_behind(folder):
    """Ctrl-C while it speaks: the command and its ranks are gone, and so is their memory."""
    before = set(os.listdir("/dev/shm"))
    options = ["--model", str(folder[0]), "--ranks", "2", "--tokens", "100000", "--prompt", "w7"]
    command = [sys.executable, "-m", "iris.generate", *options]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        while b"w" not in (shown := started.stdout.read1()):
            assert shown or started.poll() is None
        group = os.getpgid(started.pid)
        started.send_signal(signal.SIGINT)
        assert started.wait(30) == 130
    finally:
        started.kill()
        started.stdout.close()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and _members(group):
        time.sleep(0.1)
    assert _members(group) == []
    assert set(os.listdir("/dev/shm")) <= before


def _members(group):
    """Command lines of the processes of a session that are alive."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, NotADirectoryError):
            continue
        if entry.name.isdecimal() and int(fields[3]) == group and fields[0] not in "ZX":
            found.append((entry.name, (entry / "cmdline").read_text()))
    return found


def test_the_command_says_what_it_cannot_find(capfd):
    assert command.main(["--model", "nowhere"]) == 1
    assert "there is no model at nowhere" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--ranks=0", "'0' is not a whole number from 1 up"),
        ("--temperature=warm", "'warm' is not a number from 0 to 100"),
        ("--top-p=1.5", "'1.5' is not a number from 0 to 1.0"),
    ],
)
def test_bad_values_say_what_is_allowed(option, text, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main([option])
    assert text in capsys.readouterr().err


def test_text_is_written_when_characters_are_whole():
    shown = []
    pieces = {1: b"\xe2\x82", 2: b"\xac", 3: b"!", 9: b"?"}
    decode = lambda tokens: b"".join(map(pieces.get, tokens)).decode("utf-8", "replace")  # noqa: E731
    streamer = worker.Streamer(decode, shown.append, ends=(9,))
    streamer.put(torch.tensor([[5, 6]]))
    for token in (1, 2, 3, 9, 3):
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert "".join(shown) == "€!\n"
    assert shown[0] == "€"
    assert streamer.tokens == [[1, 2, 3]]
