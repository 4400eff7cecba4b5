"""Pass open files between the members of a group."""

import os
import secrets
import socket
import struct

from iris import config
from iris.errors import PeerError, TimeoutError
from iris.runtime.groups import Group, names

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_BATCH = 128  # descriptors a message may carry


def exchange_descriptors(group: Group, what: str, mine: list[int]) -> list[list[int]]:
    """Return every member's descriptors, in group order, open in this process; collective.

    The own entry is empty. Sockets are abstract (no file), have unguessable names, and refuse
    other users.
    """
    name = f"\0iris-{secrets.token_hex(16)}"
    received: dict[int, list[int]] = {group.index: []}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.settimeout(config.timeout())
        server.bind(name)
        server.listen(group.size)
        servers = group.exchange(what, name.encode())
        try:
            for index, peer in enumerate(servers):
                if index != group.index:
                    _send(peer, group.index, mine)
            for _ in servers[1:]:
                _receive(server.accept()[0], received)
        except OSError as error:
            missing = [rank for index, rank in enumerate(group.ranks) if index not in received]
            group.board.check_peers(what, missing)
            raise TimeoutError(
                f"{what}: rank {group.board.rank} has no answer of {names(missing)}: {error}",
                help="see where they are, or raise IRIS_TIMEOUT if they are only slow",
            ) from error
    return [received[index] for index in range(group.size)]


def _send(name: bytes, index: int, mine: list[int]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(config.timeout())
        peer.connect(name.decode())
        _check_user(peer)
        for at in range(0, len(mine) or 1, _BATCH):
            socket.send_fds(peer, [struct.pack("i", index)], mine[at : at + _BATCH])


def _receive(peer: socket.socket, received: dict[int, list[int]]) -> None:
    with peer:
        peer.settimeout(config.timeout())
        _check_user(peer)
        while True:
            message, descriptors, _, _ = socket.recv_fds(peer, 64, _BATCH)
            if not message:
                return
            received.setdefault(struct.unpack("i", message)[0], []).extend(descriptors)


def _check_user(peer: socket.socket) -> None:
    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(data)[1] != os.geteuid():
        raise PeerError("a process of another user answered in place of a peer")
