"""Pass open files between the members of a group."""

import builtins
import os
import secrets
import socket
import struct

from iris import config
from iris.errors import PeerError, TimeoutError
from iris.runtime.groups import Group

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_BATCH = 128  # descriptors a message may carry


def exchange_descriptors(group: Group, what: str, mine: list[int]) -> list[list[int]]:
    """Return every member's descriptors, in group order, open in this process; collective.

    The own entry is empty. Sockets are abstract (no file), have unguessable names, and refuse
    other users.
    """
    name = f"\0iris-{secrets.token_hex(16)}"
    received: list[list[int]] = [[] for _ in range(group.size)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.settimeout(config.timeout())
        server.bind(name)
        server.listen(group.size)
        names = group.exchange(what, name.encode())
        try:
            peers = [_connect(n) for i, n in enumerate(names) if i != group.index]
            for peer in peers:
                for at in range(0, len(mine), _BATCH):
                    socket.send_fds(peer, [struct.pack("i", group.index)], mine[at : at + _BATCH])
                peer.close()
            for _ in peers:
                _receive(server.accept()[0], received)
        except builtins.TimeoutError as error:
            raise TimeoutError(
                f"{what}: a peer did not connect in {config.timeout():g} s"
            ) from error
    return received


def _connect(name: bytes) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(config.timeout())
    peer.connect(name.decode())
    _check_user(peer)
    return peer


def _receive(peer: socket.socket, received: list[list[int]]) -> None:
    with peer:
        peer.settimeout(config.timeout())
        _check_user(peer)
        while True:
            message, descriptors, _, _ = socket.recv_fds(peer, 64, _BATCH)
            if not message:
                return
            received[struct.unpack("i", message)[0]] += descriptors


def _check_user(peer: socket.socket) -> None:
    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(data)[1] != os.geteuid():
        raise PeerError("a process of another user answered in place of a peer")
