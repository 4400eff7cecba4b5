"""The GEMM body that the fused stages share: one pipelined loop over a program's segments.

NOTE [One loop]
Tiles, waits and the cutting of tiles all sit inside one ``tl.range`` whose step number within the
segment, ``step``, is plain arithmetic. In this form the compiler fetches the next segment's
operands during the present one's last steps and its epilogue, with the wait in between. A ``for``
anywhere inside, or a step number that itself comes out of an ``if``, loses that; ``while`` does
not.

NOTE [Hooks]
A stage gives three device functions and a tuple ``env`` that only they look into: ``begin(env, row,
column, T)`` before the first load of a segment of the tile at output element (row, column);
``emit(env, tiles, row, column, epilogue, T)`` for every finished piece of output, [block_m, block_n
/ pieces] at that element, where ``tiles`` are the accumulators of the two weights of a pair, or the
one twice; ``done(env, row, column, T)`` after the last piece of a tile.

NOTE [Cut tiles]
Each part of a cut tile is stored in scratch memory, slice by slice, and counted. If all programs
take part in this launch, each has one part at most: it waits for the others (they have started),
and adds up every ``parts``-th piece of columns. Else the program that comes last adds up all of
them. Either way parts are added in their order. Counters only grow, as flags do.
"""

import triton.language as tl

from iris.device import tracing
from iris.device.target import device_function, fence_bulk, together
from iris.lower.kernels.protocol import wait_members
from iris.lower.kernels.schedule import SEGMENT_WORDS as _SEGMENT_WORDS

SEGMENT_WORDS = tl.constexpr(_SEGMENT_WORDS)

# How an operand is loaded. Its rows are output rows (A) or output columns (B), its other dim is the
# contracted one.
POINTERS = tl.constexpr(0)
TMA_K = tl.constexpr(1)  # tensor descriptor, contracted dim contiguous: blocks [rows, BLOCK_K]
TMA_R = tl.constexpr(2)  # tensor descriptor, rows contiguous: blocks [BLOCK_K, rows]


@device_function
def nothing(env, row, column, T: tl.constexpr):
    """A hook that does nothing."""


@device_function
def identity(tiles, rows, columns, M, N, args):
    """The epilogue of a stage that has none."""
    return tiles[0]


@device_function
def load_tile(x, row, k, K, R: tl.constexpr, BLOCK_K: tl.constexpr, MODE: tl.constexpr):
    """The [R, BLOCK_K] tile at (row, k) of an operand; zeros outside it.

    ``x = (source, rows, row stride, contracted stride)``.
    """
    if MODE == TMA_K:
        tile = x[0].load([row, k])
    elif MODE == TMA_R:
        tile = x[0].load([k, row]).T
    else:
        r = row + tl.arange(0, R)
        c = k + tl.arange(0, BLOCK_K)
        at = r[:, None].to(tl.int64) * x[2] + c[None, :].to(tl.int64) * x[3]
        tile = tl.load(x[0] + at, mask=(r < x[1])[:, None] & (c < K)[None, :], other=0.0)
    return tile


@device_function
def _dot(a, b, acc, T: tl.constexpr):
    # Triton's interpreter multiplies the bit patterns of bf16 and fp8: widen there.
    if T.widen:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(
        a,
        tl.trans(b),
        acc,
        input_precision=T.precision,
        max_num_imprecise_acc=T.promote,
        out_dtype=acc.dtype,
    )


@device_function
def _halves(x, R: tl.constexpr, C: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(x, (R, 2, C // 2)), (0, 2, 1)))


@device_function
def _pieces(x, M: tl.constexpr, N: tl.constexpr, COUNT: tl.constexpr):
    """The 1, 2, 4 or 8 column pieces of a tile: they keep the layout changes of a store small."""
    pieces = (x,)
    if COUNT >= 2:
        pieces = _halves(x, M, N)
    if COUNT >= 4:
        pieces = _halves(pieces[0], M, N // 2) + _halves(pieces[1], M, N // 2)
    if COUNT == 8:
        left = _halves(pieces[0], M, N // 4) + _halves(pieces[1], M, N // 4)
        pieces = left + _halves(pieces[2], M, N // 4) + _halves(pieces[3], M, N // 4)
    return pieces


@device_function
def _part(scratch, place, weight, column, C: tl.constexpr, T: tl.constexpr):
    """Pointers to columns ``column ..`` of the part at ``place``, which is stored by slices."""
    BM: tl.constexpr = T.block_m
    WIDTH: tl.constexpr = T.block_n // T.slices
    base = scratch + (place.to(tl.int64) * T.zipped + weight) * (BM * T.block_n)
    c = column + tl.arange(0, C)
    within = c // WIDTH * (BM * WIDTH) + c % WIDTH
    return base + (tl.arange(0, BM)[:, None] * WIDTH + within[None, :])


@device_function
def _emit_tile(env, accs, row, column, emit, epilogue, T: tl.constexpr):
    PIECES: tl.constexpr = T.pieces
    C: tl.constexpr = T.block_n // T.pieces
    first = _pieces(accs[0], T.block_m, T.block_n, PIECES)
    second = first
    if T.zipped == 2:
        second = _pieces(accs[1], T.block_m, T.block_n, PIECES)
    for j in tl.static_range(PIECES):
        emit(env, (first[j], second[j]), row, column + j * C, epilogue, T)


@device_function
def _store_part(accs, scratch, place, T: tl.constexpr):
    SLICES: tl.constexpr = T.slices
    ZIPPED: tl.constexpr = T.zipped
    WIDTH: tl.constexpr = T.block_n // T.slices
    for w in tl.static_range(ZIPPED):
        slices = _pieces(accs[w], T.block_m, T.block_n, SLICES)
        for j in tl.static_range(SLICES):
            tl.store(_part(scratch, place, w, j * WIDTH, WIDTH, T), slices[j])


@device_function
def _add_parts(scratch, space, parts, weight, column, T: tl.constexpr):
    C: tl.constexpr = T.block_n // T.pieces
    total = tl.load(_part(scratch, space, weight, column, C, T), cache_modifier=".cg")
    part = 1
    while part < parts:
        # Several at a time: a single load a step would last as long as all of these.
        for next in tl.static_range(4):
            there = _part(scratch, space + part + next, weight, column, C, T)
            live = tl.full((1, 1), part + next, tl.int32) < parts  # a block: the interpreter
            total += tl.load(there, mask=live, other=0, cache_modifier=".cg")  # fails on a scalar
        part += 4
    return total


@device_function
def _emit_parts(
    env, scratch, space, parts, row, column, at, stride, emit, epilogue, T: tl.constexpr
):
    """Add up the parts of the columns ``at``, ``at + stride``, ... of a tile, and emit them."""
    BN: tl.constexpr = T.block_n
    while at < BN:
        first = _add_parts(scratch, space, parts, 0, at, T)
        second = first
        if T.zipped == 2:
            second = _add_parts(scratch, space, parts, 1, at, T)
        emit(env, (first, second), row, column + at, epilogue, T)
        at += stride


@device_function
def _join(env, accs, at, parts, plan, row, column, emit, done, epilogue, T: tl.constexpr):
    """Store a part of a cut tile; add up and emit this program's columns: NOTE [Cut tiles]."""
    _, _, scratch, counts, epoch, team, _ = plan
    C: tl.constexpr = T.block_n // T.pieces
    part = tl.load(at + 4)
    space = tl.load(at + 6)
    count = counts + 2 * tl.load(at + 7)
    goal = parts * (epoch + 1)
    _store_part(accs, scratch, space + part, T)
    together()
    seen = tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") + 1
    whole_team = team == tl.num_programs(0)
    share = whole_team.to(tl.int32)
    if whole_team:
        while seen - goal < 0:
            seen = tl.atomic_add(count, 0, sem="acquire", scope="gpu")
        _emit_parts(env, scratch, space, parts, row, column, part * C, parts * C, emit, epilogue, T)
    elif seen == goal:
        share = parts
        _emit_parts(env, scratch, space, parts, row, column, part * 0, C, emit, epilogue, T)
    if T.announced:
        together()
        emitted = tl.atomic_add(count + 1, share, sem="acq_rel", scope="gpu") + share
        if (share > 0) & (emitted == goal):
            done(env, row, column, T)


@device_function
def _flush(env, accs, segment, plan, row, column, emit, done, epilogue, T: tl.constexpr):
    at = plan[1] + segment * SEGMENT_WORDS
    parts = tl.load(at + 5)
    if parts == 1:
        _emit_tile(env, accs, row, column, emit, epilogue, T)
        done(env, row, column, T)
    else:
        _join(env, accs, at, parts, plan, row, column, emit, done, epilogue, T)


@device_function
def _share(heads, table, number, team, depth):
    """This program's first segment of a weight, and its steps in all of them."""
    first = tl.load(heads)
    cut = tl.load(heads + 1)
    end = tl.load(heads + 2)
    start = first + (number - first % team + team) % team
    tiles = tl.maximum(0, (cut - start + team - 1) // team)
    steps = tiles * depth
    segment = start + tiles * team
    while segment < end:
        steps += tl.load(table + segment * SEGMENT_WORDS + 3)
        segment += team
    return start, tl.where(number < team, steps, 0)


@device_function
def _arrive(parts, k, seen, K, T: tl.constexpr):
    """Wait for the columns that step ``k`` of a tile reads; return where it may read.

    ``parts = (flags, epoch, watch, columns of a shard)``; ``seen`` has the bits of members whose
    columns came before. The place depends on what the wait returns: so no load is issued earlier.
    """
    flags, epoch, watch, shard = parts
    first = k // shard
    last = tl.maximum(first, (tl.minimum(k + T.block_k, K) - 1) // shard)
    bits = ((1 << last) - (1 << first)) | (1 << last)
    if (bits & (seen ^ -1)) != 0:
        came = wait_members(flags, first, last, epoch, watch, T.lanes)
        if T.a_mode != POINTERS:
            fence_bulk()
        seen = seen | bits
        k = tl.where(came, k, K)
    return k, seen


@device_function
def run_segments(a, b, b2, K, plan, number, begin, emit, done, env, epilogue, T: tl.constexpr):
    """Compute this program's segments of ``a @ b.T`` (and ``a @ b2.T`` where ``T.zipped`` is 2).

    ``plan = (heads, table, scratch, counts, epoch, team, watch)``, see
    `iris.lower.kernels.schedule` and ``protocol``; ``a`` and ``b`` as in ``load_tile``, with
    ``a[4]`` the row of the source where output row 0 is; where its columns arrive from other ranks
    (``T.by_columns``), ``a[5]`` is what ``_arrive`` takes.
    """
    BM: tl.constexpr = T.block_m
    BN: tl.constexpr = T.block_n
    heads, table, _, _, _, team, watch = plan
    depth = tl.maximum(1, tl.cdiv(K, T.block_k))
    segment, steps = _share(heads, table, number, team, depth)
    segment -= team
    step = -1
    row = 0
    column = 0
    first = 0
    count = 0
    acc = tl.zeros((BM, BN), T.acc)
    acc2 = acc
    seen = 0
    since = tracing.begin(watch)
    for _ in tl.range(0, steps):
        step = tl.where(step == count - 1, 0, step + 1)
        if step == 0:
            segment += team
            row = tl.load(table + segment * SEGMENT_WORDS) * BM
            column = tl.load(table + segment * SEGMENT_WORDS + 1) * BN
            first = tl.load(table + segment * SEGMENT_WORDS + 2)
            count = tl.load(table + segment * SEGMENT_WORDS + 3)
            begin(env, row, column, T)
            since = tracing.begin(watch)
        k = (first + step) * T.block_k
        if T.by_columns:
            k, seen = _arrive(a[5], k, seen, K, T)
        x = load_tile(a, a[4] + row, k, K, T.block_m, T.block_k, T.a_mode)
        acc = _dot(x, load_tile(b, column, k, K, T.block_n, T.block_k, T.b_mode), acc, T)
        if T.zipped == 2:
            y = load_tile(b2, column, k, K, T.block_n, T.block_k, T.b_mode)
            acc2 = _dot(x, y, acc2, T)
        if step == count - 1:
            tracing.end(watch, since, tracing.TILE, detail=(row.to(tl.int64) << 32) | column)
            emitting = tracing.begin(watch)
            _flush(env, (acc, acc2), segment, plan, row, column, emit, done, epilogue, T)
            tracing.end(watch, emitting, tracing.EMIT)
            acc = tl.zeros((BM, BN), T.acc)
            acc2 = tl.zeros((BM, BN), T.acc)


@device_function
def finish_piece(tiles, row, column, out, M, N, epilogue, args, T: tl.constexpr):
    """Epilogue and store of one piece; ``out = (target, row stride, column stride)``."""
    rows = row + tl.arange(0, T.block_m)
    columns = column + tl.arange(0, T.block_n // T.pieces)
    value = epilogue(tiles, rows, columns, M, N, args)
    if T.out_tma:
        out[0].store([row, column], value.to(out[0].dtype))
    else:
        at = rows[:, None].to(tl.int64) * out[1] + columns[None, :].to(tl.int64) * out[2]
        mask = (rows < M)[:, None] & (columns < N)[None, :]
        tl.store(out[0] + at, value.to(out[0].dtype.element_ty), mask=mask)
