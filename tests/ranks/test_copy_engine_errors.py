"""Wrong uses of the copy engine: each is told in words before anything is copied."""

import os

import pytest
import torch

import iris
from iris.errors import ConfigError, LaunchError

pytestmark = pytest.mark.ranks


TWO = "to_tensor: float16[4, 6], from_tensor is float32[4, 6]"


def wrong_arguments():
    ctx = iris.iris(1 << 20, engines=("sdma",))
    x, y = ctx.ones(4, 6), ctx.ones(4, 6, dtype=torch.float16)
    flag = ctx.zeros(1, dtype=torch.int32)
    me = f"rank {ctx.cur_rank} of {ctx.num_ranks}"
    way_out = (
        "help: copies go to this context's tensors (ctx.zeros, ctx.as_symmetric), element by "
        "element"
    )
    alone = torch.ones(4, 6, device=ctx.device)
    base, end = ctx.heap.bases[0], ctx.heap.bases[0] + ctx.heap._slab.nbytes
    half = ctx.zeros(1, dtype=torch.float16)
    pairs = ctx.zeros(4, dtype=torch.complex64)
    ints = "one int32, int64, uint32 or uint64"
    both = "wait_flag and wait_value: give both or none"
    cases = [
        (lambda: ctx.put(x, 2, y), ["to_rank=2: ranks are 0 to 1", TWO]),
        (lambda: ctx.put(x, True), ["to_rank=True: ranks are 0 to 1"]),
        (lambda: ctx.put(x, 1, x[:3]), ["to_tensor: float32[3, 6], from_tensor is float32[4, 6]"]),
        (lambda: ctx.put(alone, 1), ["from_tensor: not on the symmetric heap"]),
        (lambda: ctx.put(x, 1, alone), ["to_tensor: not on the symmetric heap"]),
        (lambda: ctx.put(3, 1), ["from_tensor: int is no strided tensor"]),
        (
            lambda: ctx.put(x.to("meta"), 1),
            [f"from_tensor: on meta, this rank is on {ctx.device}"],
        ),
        (lambda: ctx.put(x, 1, channel=16), ["channel=16: channels are 0 to 15"]),
        (lambda: ctx.put(x, 1, wait_flag=flag), [both]),
        (lambda: ctx.put(x, 1, wait_value=1), [both]),
        (
            lambda: ctx.put(x, 1, wait_flag=half, wait_value=1),
            [f"wait_flag: float16[1] is not {ints}"],
        ),
        (lambda: ctx.put(x, 1, signal_flag=y), [f"signal_flag: float16[4, 6] is not {ints}"]),
        (
            lambda: ctx.put(x, 1, signal_flag=torch.zeros(1, dtype=torch.int64, device=ctx.device)),
            ["signal_flag: not on the symmetric heap"],
        ),
        (
            lambda: ctx.put(x, 1, signal_flag=flag, signal_value=1 << 32, signal_op="or"),
            [
                "signal_op='or': it is 'set' or 'add'",
                f"signal_value={1 << 32}: no integer of 32 bits",
            ],
        ),
        (lambda: ctx.quiet(-1), ["to_rank=-1: ranks are 0 to 1"]),
        (lambda: ctx.put_tile(x[0], 1, x, 24), ["tile: float32[6] has not 2 dims"]),
        (
            lambda: ctx.put_tile(x, 1, x, 20),
            ["stride 20 of tile: a row of float32[4, 6] has 24 bytes"],
        ),
        (
            lambda: ctx.put_tile(x, 0, end - 8, 24),
            [f"to_ptr={end - 8:#x}: 96 bytes there are not all on the heap of rank 0"],
        ),
        (
            lambda: ctx.put_tile(x, 0, base - 8, 24),
            [f"to_ptr={base - 8:#x}: 96 bytes there are not all on the heap of rank 0"],
        ),
        (
            lambda: ctx.put_tile(x, 1, None, 24),
            ["to_ptr: NoneType is neither an address nor a tensor"],
        ),
        (
            lambda: ctx.put_tiles([x, x[0]], 1, [x], [24, 24, 24]),
            ["lists of unequal length: 2 tiles, 1 to_ptrs, 3 to_strides"],
        ),
        (
            lambda: ctx.put_tiles(iter([x]), 1, x.data_ptr(), [24]),
            ["tiles: list_iterator is no list", "to_ptrs: int is no list"],
        ),
        (
            lambda: ctx.put_tile(x, 1, y, 24),
            ["to_ptr: float16[4, 6], the tile is float32[4, 6]"],
        ),
        (
            lambda: ctx.put_tile(x, 1, x[2:], 24),  # its last rows belong to another tensor
            ["to_ptr: 96 bytes are more than the 48 that were allocated from there"],
        ),
        (
            lambda: ctx.put(pairs.conj(), 1, pairs),
            [
                "from_tensor: a view whose memory holds other values; "
                "pass .resolve_conj().resolve_neg()"
            ],
        ),
        (
            lambda: ctx.put(x, 1, x[:1].expand(4, 6)),
            ["to_tensor: elements of float32[4, 6] share a place"],
        ),
    ]
    for call, problems in cases:
        with pytest.raises(ConfigError) as caught:
            call()
        assert isinstance(caught.value, ValueError)
        lines = str(caught.value).split("\n")
        name = lines[0].partition(":")[0]
        count = f"{len(problems)} arguments do" if len(problems) > 1 else "1 argument does"
        assert lines[0] == f"{name}: {count} not fit"
        assert lines[1].startswith("  at test_copy_engine_errors.py:")
        assert lines[1].endswith(me)
        assert [line.strip() for line in lines[2:-1]] == problems
        assert lines[-1] == way_out
    ctx.barrier()


def test_wrong_arguments_are_all_named(ranks):
    ranks(2).run(wrong_arguments)


def test_layouts_with_nothing_in_common_are_refused():
    with iris.iris(1 << 20, engines=("sdma",)) as ctx:
        x, y = ctx.zeros(2, 20, 20, 20, 20, dtype=torch.int8)
        with pytest.raises(ConfigError, match="falls into more than 4096 pieces"):
            ctx.put(x, 0, y.permute(3, 2, 1, 0))


def on_some_ranks():
    iris.iris(1 << 20, engines=("sdma",) if int(os.environ["RANK"]) else ())


def test_engines_on_some_ranks_only_are_an_error_on_all(ranks):
    with pytest.raises(LaunchError) as caught:
        ranks(3).run(on_some_ranks)
    text = str(caught.value)
    plain = "iris.iris(heap_size=1048576, allocator_type='torch'"
    assert "3 of 3 ranks failed" in text
    assert "ranks of one group are in different calls" in text
    assert f"rank 0: {plain}) on " in text
    assert f"rank 2: {plain}, engines=('sdma',)) on " in text
