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
# # 2. Your first program
#
# A *program* is an ordinary PyTorch function over tensors that are spread over ranks, with
# `@iris.spmd` in front of it. This notebook runs one on four CPU ranks, makes the classic mistake,
# and looks inside.

# %%
import torch
import torch.nn.functional as F
from IPython.display import SVG

import iris
from iris import P

mesh = iris.local_mesh(4, "tp")
mesh

# %% [markdown]
# `iris.local_mesh` has started four processes, the *ranks*, as one mesh axis called `tp`. They
# stay until `mesh.close()`. A program on a local mesh takes and returns **global** tensors: iris
# gives every rank its part, and puts the parts of the result together.
#
# ## Specs
#
# A spec says how a tensor is split. `P("tp", None)`: dim 0 is split over `tp`, dim 1 is not.
# `P()`: every rank has all of it.


# %%
@iris.spmd(
    mesh=mesh,
    in_specs=(P("tp", None), P(None, "tp"), P("tp", None)),
    out_specs=P("tp", None),
)
def mlp(x, w_up, w_down):
    h = F.silu(iris.all_gather(x, "tp", dim=0) @ w_up)
    return iris.reduce_scatter(h @ w_down, "tp", dim=0)


torch.manual_seed(0)
x, w_up, w_down = torch.randn(8, 4), torch.randn(4, 16), torch.randn(16, 4)
y = mlp(x, w_up, w_down)
expected = F.silu(x @ w_up) @ w_down
print(y.shape, torch.allclose(y, expected, atol=1e-5))

# %% [markdown]
# Inside the function each rank sees its own part. A `print` shows it: it runs while the function
# is traced, once on every rank.


# %%
@iris.spmd(mesh=mesh, in_specs=P("tp", None), out_specs=P("tp", None))
def double(x):
    print("I see", tuple(x.shape))
    return 2 * x


print(double(x).shape)

# %% [markdown]
# ## Types
#
# The first call traces the function: it runs on tensors without data, and iris writes down each
# operation. Here is what it wrote. Every value has a type, and every line names the line of yours
# that made it.

# %%
print(mlp.trace(x, w_up, w_down).as_text())

# %% [markdown]
# How to read a type:
#
# * `f32[8/tp, 4]` has 8 rows in all, split over the ranks of `tp`.
# * `f32[8, 4]` is whole on every rank, and the same on all of them.
# * `f32[8, 4]+tp` is one term of a sum: the true value is the sum over `tp`, which is due.
#
# Look at the second `matmul`: both operands are split along the dim that is summed, so each rank
# computes a term, and the type says `+tp`. `reduce_scatter` adds the terms and leaves each rank
# its rows.
#
# ## The forgotten sum
#
# Leave the `reduce_scatter` out. In plain PyTorch this runs, and each rank returns a different,
# wrong number.


# %%
@iris.spmd(
    mesh=mesh,
    in_specs=(P(), P(None, "tp"), P("tp", None)),
    out_specs=P(),
)
def forgotten(x, w_up, w_down):
    return F.silu(x @ w_up) @ w_down


try:
    forgotten(x, w_up, w_down)
except iris.TypeRuleError as error:
    print(error)

# %% [markdown]
# The same goes for a bias that is added before the sum: it would be counted four times.


# %%
@iris.spmd(
    mesh=mesh,
    in_specs=(P(), P(None, "tp"), P("tp", None), P()),
    out_specs=P(),
)
def early_bias(x, w_up, w_down, bias):
    return iris.all_reduce(F.silu(x @ w_up) @ w_down + bias, "tp")


try:
    early_bias(x, w_up, w_down, torch.ones(4))
except iris.TypeRuleError as error:
    print(error)

# %% [markdown]
# ## Stages
#
# After the trace, iris fuses products with the communication next to them. `explain` says what
# became of the program: which stages, how each is computed, and what was not fused and why.

# %%
mlp.explain(x, w_up, w_down)

# %% [markdown]
# The graph in stages. A stage is followed by the operations that it replaces.

# %%
print(mlp.trace(x, w_up, w_down).lower().graph)

# %% [markdown]
# And as a picture: a box is a stage.

# %%
SVG(iris.draw(mlp.trace(x, w_up, w_down).lower()))

# %% [markdown]
# ## Edit and run again
#
# Change a cell and call again: the ranks get the new function. That holds for the helpers it calls
# and for the values it reads from outside, too.

# %%
scale = 1.0


def activation(x):
    return F.relu(x) * scale


@iris.spmd(mesh=mesh, in_specs=(P(), P(None, "tp")), out_specs=P(None, "tp"))
def up(x, w_up):
    return activation(x @ w_up)


print(torch.allclose(up(x, w_up), F.relu(x @ w_up), atol=1e-5))
scale = 10.0
print(torch.allclose(up(x, w_up), 10 * F.relu(x @ w_up), atol=1e-5))

# %% [markdown]
# ## Sizes that do not divide
#
# Seven rows over four ranks: two, two, two and one, as `torch.chunk` cuts them.

# %%
print(double(torch.ones(7, 4)).sum())

# %%
mesh.close()

# %% [markdown]
# Next: [3. Fusion](3_fusion.ipynb).
