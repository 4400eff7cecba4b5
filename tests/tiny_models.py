"""Small models of transformers with random weights, and what they answer."""

import torch
import transformers

TOKENS = 6
WINDOWS = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
KINDS = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 6},
    "qwen2": {"use_sliding_window": False},  # biases on q, k and v
    "qwen3": {"head_dim": 8, **WINDOWS},  # norms of heads
    "smollm3": {"no_rope_layer_interval": 2},  # layers without positions
    "ministral": {
        "head_dim": 8,
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "olmo": {},  # norms without weights
    "seed_oss": {"head_dim": 8, "attention_bias": True, "attention_out_bias": True},
    "gemma": {"head_dim": 8},  # GEGLU, norms of one and more, scaled embeddings
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6},  # bounded scores
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6},  # two angles
}


def tiny(kind, heads=9, kv_heads=3, **options):
    """A small model with random weights, the same in every process."""
    sizes = {
        "vocab_size": 61,
        "hidden_size": 8 * heads,
        "intermediate_size": 50,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    config = transformers.AutoConfig.for_model(kind, **(sizes | KINDS[kind] | options))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # larger than they are initialised: clear winners
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def ask(model, ids, mask=None, tokens=TOKENS, **options):
    """Greedy tokens and the logits of every step."""
    mask = torch.ones_like(ids) if mask is None else mask
    found = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=tokens,
        return_dict_in_generate=True,
        output_logits=True,
        **({"do_sample": False} | options),
    )
    return found.sequences, torch.stack(found.logits)


def check(by_rank, expected, close=1e-4):
    """Every rank gave the expected tokens and logits for every prompt."""
    for found in by_rank:
        for (tokens, logits), (others, other_logits) in zip(found, expected, strict=True):
            assert torch.equal(tokens, others)
            torch.testing.assert_close(logits, other_logits, rtol=close, atol=close)
