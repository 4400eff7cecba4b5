"""Tensor-parallel models of Hugging Face transformers: the same ``model.generate``, run by fused
programs.
"""

from iris.hf.parallel import parallelize as parallelize
from iris.hf.saving import whole_state_dict as whole_state_dict
from iris.spmd.summary import Summary as Summary, explain as explain
