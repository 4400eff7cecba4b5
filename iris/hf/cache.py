"""The cache of a parallelized model: any cache of transformers, in which this rank's heads of all
layers are one tensor.
"""

from typing import Any

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from iris.errors import UnsupportedError
from iris.nn.attention import KVCache
from iris.spmd.buckets import rounded

# How this version of transformers calls the cache, among arguments and results.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
HELP = "pass no cache at first, or an empty one, and then the same again"


class HeldLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """All layers of a model, as the one layer that transformers sees: a `KVCache`, once there are
    keys.
    """

    is_compileable = False
    is_sliding = False
    is_croppable = True

    def __init__(self, capacity: int = 0) -> None:
        """``capacity`` rows are kept from the start, more as they are needed."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.first = capacity
        self.held: KVCache | None = None

    def append(self, new: Tensor, rows: int) -> None:
        """See :meth:`KVCache.append`."""
        if self.held is None:
            self.held = KVCache(new, self.first)
        self.held.append(new, rows)

    def get_seq_length(self) -> int:
        """Rows in use."""
        return 0 if self.held is None else self.held.length

    def get_max_length(self) -> int:
        """There is no most."""
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a mask is over, and the first one's number."""
        return self.get_seq_length() + query_length, 0

    def reset(self) -> None:
        """Forget all rows."""
        self.held = None

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` rows; of a positive number, those after it."""
        if self.held is not None:
            length = self.held.length
            kept = tokens_to_remove if tokens_to_remove > 0 else length + tokens_to_remove
            self.held.length = max(0, min(length, kept))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the batch entries ``beam_idx``, as beam search asks."""
        if self.held is not None:
            self.held.tensor = self.held.tensor.index_select(2, beam_idx)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Put every batch entry there ``repeats`` times."""
        if self.held is not None:
            self.held.tensor = self.held.tensor.repeat_interleave(repeats, 2)

    def lazy_initialization(self, *keys: Tensor) -> None:
        """Keys of whole heads are refused."""
        raise UnsupportedError("a parallelized model's cache takes no keys from outside", help=HELP)

    update: Any = lazy_initialization


def held_layer(cache: Any) -> HeldLayer:
    """The layer of a cache of transformers. It takes the place of the layers of an empty one, and
    has room for as many rows as a static one.
    """
    if not isinstance(cache, Cache):
        raise UnsupportedError(f"a {type(cache).__name__} is no cache of transformers", help=HELP)
    if cache.layers and isinstance(cache.layers[0], HeldLayer):
        return cache.layers[0]
    if cache.get_seq_length():
        raise UnsupportedError(
            f"a {type(cache).__name__} that holds keys of whole heads cannot be split over ranks",
            help=HELP,
        )
    longest = max((getattr(layer, "max_cache_len", 0) for layer in cache.layers), default=0)
    layer = HeldLayer(rounded(longest) if longest else 0)
    cache.layers, cache.layer_class_to_replicate, cache.offloading = [layer], None, False
    return layer
