"""Layout of the queues through which kernels ask for copies.

NOTE [Copy queues]
A rank has a queue for each peer: a ring of descriptors in memory that the host reads, filled by any
program of any kernel and emptied by one thread of the host. A program draws a ticket from WRITE,
waits until READ says that the ticket's place is free, writes the descriptor, and last the
descriptor's SEQ, ticket + 1, as a release. So the host sees whole descriptors, in order, however
many programs write at once. The word after BELL, in the host's memory, says how many descriptors
the host has taken, and programs that wait carry that over to READ. So a full queue waits for the
host's own store, never for a copy, which may need an SM that the waiting programs hold, nor for the
driver, which may be busy loading a kernel until they end. The host has descriptors carried out in
order, and DONE, for which ``quiet`` waits, moves past what has arrived. BELL only says where to
look first: the host looks everywhere now and then. Tickets have 64 bits and are compared by the
difference of the low 32, so they may wrap.
"""

# Words of the context tensor, a row for each peer.
QUEUE = 0  # address of the ring
READ = 1  # address of the number of descriptors that are known to have been taken
WRITE = 2  # address of the next ticket
BELL = 3  # address of the doorbell, and after it of what the host has taken
SLOTS = 4  # descriptors in the ring
RECORD = 5  # address of the record of waits (see watch.py)
STAGE = 6  # what these waits are called there
DONE = 7  # address of the number of descriptors that are done
ROW = 8

# Words of a descriptor.
SEQ, OP, DST, SRC, WIDTH, HEIGHT, DST_PITCH, SRC_PITCH = range(8)
WORDS = 8

# Operations. ADD adds SRC, a number, to the integer of WIDTH bytes at DST; SET puts it there.
COPY, ADD, SET = 1, 2, 3
