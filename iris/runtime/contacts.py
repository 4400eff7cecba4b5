"""How ranks introduce themselves to each other before they share memory."""

import json
import os
from pathlib import Path
from typing import Any

from iris.errors import UnsupportedError
from iris.runtime.board import Board, Contact
from iris.runtime.devices import Placement, Share
from iris.runtime.rendezvous import Rendezvous
from iris.runtime.segments import Address


def meet(rendezvous: Rendezvous, board: Board, placement: Placement) -> list[Share]:
    """Exchange contacts with all ranks and open their boards. Return each one's device share."""
    own = board.contact
    card = {
        "host": _host(),
        "share": placement.share(),
        "pid": own.pid,
        "started": own.started,
        "fd": own.address.fd,
        "nbytes": own.address.nbytes,
        "secret": own.address.secret.hex(),
    }
    cards = [
        json.loads(text)
        for text in rendezvous.gather(
            "iris.iris", f"cards/{rendezvous.attempt()}", json.dumps(card)
        )
    ]
    away = [rank for rank, other in enumerate(cards) if other["host"] != card["host"]]
    if away:
        raise UnsupportedError(
            f"ranks {away} run on another host or in another container than rank {own.rank}",
            help="the symmetric heap spans one host: start all ranks there",
        )
    board.connect([_contact(rank, other) for rank, other in enumerate(cards)])
    return [Share(*other["share"]) for other in cards]


def _contact(rank: int, card: dict[str, Any]) -> Contact:
    address = Address(card["pid"], card["fd"], card["nbytes"], bytes.fromhex(card["secret"]))
    return Contact(rank, address.pid, card["started"], address)


def _host() -> str:
    """Name what shared memory can span: one boot of one kernel, one process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return os.uname().nodename
