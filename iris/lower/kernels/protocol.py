"""How the programs of a stage meet, on a rank and across ranks: what all kernels here are built on.

NOTE [Epochs]
A stage counts its launches: the epoch lives on the device (``state``), so a replayed CUDA graph
goes on counting. The last program of a launch advances it. A flag is one int32 word that one rank
writes and that only grows: "done in epoch e" is ``e + 1``, compared as a difference, so that it may
wrap. Staging has two halves, used in turn. A rank at epoch e + 2 cannot overwrite what a peer still
reads at e: it has passed its waits of e + 1, so every peer has started e + 1, so has finished e. So
every rank publishes in every launch, be its shard empty, and every launch waits for every member
(``meet`` where its work does not). Stages of a program take turns in one staging: NOTE [Turns] in
`workspace`.

NOTE [Progress]
Nothing waits for a program that has not started; grids are now and then not wholly resident, with
or without MPS partitions. Programs take their number in the order they start (``enter``). Work that
others wait for is taken by ticket, or is shared among the *team*: the programs that have started by
the time the first one asks. One that starts later finds no such work. A whole kernel must be able
to start while those of peers wait, so grids of ranks that share a GPU leave each other room
(`iris.lower.kernels.config.processors`).

NOTE [Crowds]
Of four ranks with a fifth of a GPU each, a launch that began while peers were still in the one
before often found less than its share: some programs started when others had ended, and all ranks
waited for them. (One H200, 26 of 132 multiprocessors a rank, a gather and a product of 512 rows:
118 us, and 170 to 230 in such a launch.) So where more than two ranks share a GPU, long launches
end together: the last program of a rank waits for those of its peers, and all begin anew on an
empty GPU.
"""

import triton.language as tl

from iris.device import signals, tracing
from iris.device.target import INTERPRETED, device_function, together

# Words of a stage's local state (int32). EPOCH grows; the last program of a launch sets the others
# back to 0.
EPOCH = tl.constexpr(0)
STARTED = tl.constexpr(1)
ARRIVED = tl.constexpr(2)
FAILED = tl.constexpr(3)
# TICKETS + 2 i: tickets taken of work list i; TICKETS + 2 i + 1: items of it that are done
TICKETS = tl.constexpr(4)
NO_ITEM = tl.constexpr(0x7FFFFFFF)
STATE_WORDS = 16  # and beside them the turn: NOTE [Turns] in workspace.py
PATIENCE = tl.constexpr(0 if INTERPRETED.value else 8)


@device_function
def enter(state):
    """Return this launch's epoch and turn, and this program's number in the order of starting.

    ``state`` is (this stage's words, the turn of its arena, where all members' flags of the ends of
    launches are, or None).
    """
    epoch = tl.load(state[0] + EPOCH)
    turn = tl.load(state[1])
    number = tl.atomic_add(state[0] + STARTED, 1, sem="relaxed", scope="gpu")
    return epoch, turn, number & 0xFFFF


@device_function
def leave(state, epoch, turn, rank, watch, T: tl.constexpr):
    """Count this program out. The last one prepares ``state`` for the next launch."""
    together()
    before = tl.atomic_add(state[0] + ARRIVED, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        if state[2] is not None:
            publish(state[2], rank, epoch, T.world, T.lanes)
            wait_members(peer(state[2], rank, tl.int32), 0, T.world - 1, epoch, watch, T.lanes)
        words = tl.arange(0, 16)
        tl.store(state[0] + words, tl.zeros((16,), tl.int32), mask=words != EPOCH)
        tl.store(state[0] + EPOCH, epoch + 1)
        tl.store(state[1], turn + 1)


@device_function
def team(state):
    """How many programs share the tiles of this launch; the same for all that ask.

    Programs of a resident grid start within a microsecond. If some are missing after a few looks,
    the first to lose patience writes the number so far above the counter, and later ones are left
    out.
    """
    all_programs = tl.num_programs(0)
    word = tl.atomic_add(state[0] + STARTED, 0, sem="relaxed", scope="gpu")
    looks = 0
    while (word < all_programs) & (looks < PATIENCE):
        word = tl.atomic_add(state[0] + STARTED, 0, sem="relaxed", scope="gpu")
        looks += 1
    while word < all_programs:
        before = tl.atomic_cas(
            state[0] + STARTED, word, word | (word << 16), sem="relaxed", scope="gpu"
        )
        word = tl.where(before == word, word | (word << 16), before)
    return tl.where(word >> 16 == 0, all_programs, word >> 16)


@device_function
def ticket(state, work: tl.constexpr):
    """Take the next item of a work list of this launch.

    Taken before the present item is worked on, it costs no time; one too many does no harm.
    """
    return tl.atomic_add(state[0] + (TICKETS + 2 * work), 1, sem="relaxed", scope="gpu")


@device_function
def first_item(number, T: tl.constexpr):
    """Program ``number``'s first item of a list that nobody waits for: none outside the crew."""
    if T.communication > 0:
        number = tl.where(number < T.communication, number, NO_ITEM)
    return number


@device_function
def first_ticket(state, work: tl.constexpr, number, T: tl.constexpr):
    """Program ``number``'s first ticket of a work list: none outside the crew."""
    if T.communication == 0:
        item = ticket(state, work)
    else:
        item = NO_ITEM
        if number < T.communication:
            item = ticket(state, work)
    return item


@device_function
def crew(T: tl.constexpr):
    """How many programs send, sum and collect: the first to start, so nothing waits in vain."""
    size = tl.num_programs(0)
    if T.communication > 0:
        size = tl.minimum(size, T.communication)
    return size


@device_function
def finished(state, work: tl.constexpr, count, total, number):
    """Report ``count`` items of a work list done. True for the program that completes ``total``.

    What all programs stored for their items happens before what that program does next. Of an empty
    list, program 0 is that one.
    """
    together()
    last = (total == 0) & (number == 0)
    if count > 0:
        before = tl.atomic_add(
            state[0] + (TICKETS + 2 * work + 1), count, sem="acq_rel", scope="gpu"
        )
        last = before + count == total
    return last


@device_function
def peer(table, index, dtype: tl.constexpr):
    """The address of member ``index``'s block. Blocks and rows in them are 16-byte aligned."""
    return tl.multiple_of(tl.cast(tl.load(table + index), tl.pointer_type(dtype)), 16)


@device_function
def publish(flags, index, epoch, W: tl.constexpr, LANES: tl.constexpr):
    """Tell every member that what this program stored before is there."""
    publish_to(flags, 0, W - 1, index, epoch, LANES)


@device_function
def publish_to(flags, first, last, index, epoch, LANES: tl.constexpr):
    """Set flag ``index`` of members ``first .. last`` to ``epoch + 1``."""
    together()
    members = tl.arange(0, LANES)
    valid = (members >= first) & (members <= last)
    words = tl.cast(tl.load(flags + members, mask=valid, other=0), tl.pointer_type(tl.int32))
    tl.atomic_xchg(words + index, epoch + 1, mask=valid, sem="release", scope="sys")


@device_function
def wait(words, members, valid, epoch, watch):
    """Wait until the flags at ``words`` say ``epoch + 1``: of those ``members`` that are ``valid``.

    Reads after it see what was stored before the flags were set. ``watch`` is (record, stage,
    trace): see NOTE [Bounded waits] in `iris.device.watch`, and `iris.device.tracing`. A wait that
    runs out returns too, false; the host will raise.
    """
    since = tracing.begin(watch)
    came = signals.wait(words, epoch + 1, watch[0], watch[1], members, valid)
    if watch[2] is not None:
        bits = tracing.member_bits(members, valid)
        tracing.end(watch, since, tracing.WAIT, peers=bits)
    return came


@device_function
def wait_members(flags, first, last, epoch, watch, LANES: tl.constexpr):
    """Wait for the flags ``flags[m]`` of the members ``first <= m <= last``."""
    members = tl.arange(0, LANES)
    valid = (members >= first) & (members <= last)
    return wait(flags + members, members, valid, epoch, watch)


@device_function
def greet(flags, rank, number, epoch, W: tl.constexpr, LANES: tl.constexpr):
    """Let program 0 tell every member that this launch has started. Goes with ``meet``."""
    if number == 0:
        publish(flags, rank, epoch, W, LANES)


@device_function
def meet(flags, number, epoch, watch, W: tl.constexpr, LANES: tl.constexpr):
    """Let program 0 wait for every member, in a launch whose work may not."""
    if number == 0:
        wait_members(flags, 0, W - 1, epoch, watch, LANES)
