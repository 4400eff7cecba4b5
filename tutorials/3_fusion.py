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
# # 3. Fusion
#
# A product that waits for communication, or communication that waits for a product, leaves half of
# the machine idle. iris fuses the two into a *stage*: one kernel that works on the chunks that are
# there while the others are on their way. This notebook shows what is fused, what is not, and the
# Triton code that comes out.

# %%
import torch
import torch.nn.functional as F

import iris
from iris import P

mesh = iris.local_mesh(4, "tp", heap_size=1 << 24)

# %% [markdown]
# ## Two stages
#
# A SwiGLU block, as in Llama. `lowering="triton"` runs the kernels that a GPU runs, here in
# Triton's interpreter. On CPU ranks the default is `"torch"`: the same stages as torch operations,
# which is quicker and serves as the oracle.

# %%
specs = {
    "mesh": mesh,
    "in_specs": (P("tp"), P(None, "tp"), P(None, "tp"), P("tp")),
    "out_specs": P("tp"),
}


@iris.spmd(**specs, lowering="triton")
def swiglu(x, w_gate, w_up, w_down):
    g = iris.all_gather(x, "tp", dim=0)
    h = F.silu(g @ w_gate) * (g @ w_up)
    return iris.reduce_scatter(h @ w_down, "tp", dim=0)


torch.manual_seed(0)
M, K, N = 32, 16, 64
sizes = (M, K), (K, N), (K, N), (N, K)
args = x, w_gate, w_up, w_down = [torch.randn(size) / 4 for size in sizes]
y = swiglu(*args)
expected = (F.silu(x @ w_gate) * (x @ w_up)) @ w_down
print("agrees with one rank:", torch.allclose(y, expected, atol=1e-5))

# %% [markdown]
# Seven operations became two stages. Indented below each stage is what it replaces: the first is
# one gather, two products, and the pointwise operations between them (the *epilogue*).

# %%
print(swiglu.trace(*args).lower().graph)

# %%
swiglu.explain(*args)

# %% [markdown]
# ## The same program, unfused
#
# `fuse=False` keeps every collective apart. The results agree: a fusion may not change what a
# program means.

# %%
unfused = iris.spmd(**specs, fuse=False)(swiglu.__wrapped__)
print(unfused.trace(*args).lower().graph)
print("agrees:", torch.allclose(unfused(*args), y, atol=1e-5))

# %% [markdown]
# ## The generated Triton
#
# A stage is a hand-written Triton kernel; its epilogue is generated from your lines.

# %%
for stage, source in swiglu.trace(*args).lower().kernels().items():
    print(stage, source, sep="\n")

# %% [markdown]
# ## What an epilogue can hold
#
# Any chain of pointwise operations: a bias, an activation, a factor, a residual. It runs on a tile
# of the product while the tile is still in registers. The bias here is split as the columns of the
# product are.


# %%
@iris.spmd(
    mesh=mesh,
    in_specs=(P("tp"), P(None, "tp"), P("tp")),
    out_specs=P(None, "tp"),
    lowering="triton",
)
def biased(x, w, bias):
    return F.gelu(iris.all_gather(x, "tp", dim=0) @ w + bias) * 0.5


bias = torch.randn(N)
print(biased.trace(x, w_up, bias).lower().graph)
close = torch.allclose(biased(x, w_up, bias), F.gelu(x @ w_up + bias) * 0.5, atol=1e-5)
print("agrees:", close)

# %% [markdown]
# ## What is not fused, and why
#
# Nothing that torch can run is refused: what has no stage runs as it is. `explain` gives the
# reason for each collective that was left alone.


# %%
@iris.spmd(mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=(P(), P(None, "tp")))
def loose(x, w):
    h = torch.cumsum(iris.all_gather(x, "tp", dim=0) @ w, dim=0)
    return iris.all_reduce(h.sum(1), "tp"), h


for collective, where, reason in loose.explain(x, w_up).unfused:
    print(f"{collective} at {where}: {reason}")

# %% [markdown]
# A value that is used twice is kept: here the gathered `g` is returned as well, so the stage gives
# both.


# %%
@iris.spmd(mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=(P(None, "tp"), P()))
def both(x, w):
    g = iris.all_gather(x, "tp", dim=0)
    return g @ w, g * 1


print(both.trace(x, w_up).lower().graph)

# %% [markdown]
# ## Who waits for whom
#
# `mesh.profile()` records when each rank did what. The names are those of the graph; `wait` is
# time spent waiting for peers. `timeline.save("trace.json")` writes a trace for `ui.perfetto.dev`,
# `timeline.plot()` draws it.

# %%
with mesh.profile() as timeline:
    unfused(*args)
for name in timeline.names(0):
    print(name)

# %%
mesh.close()

# %% [markdown]
# Next: [4. A transformer on three ranks](4_transformer.ipynb).
