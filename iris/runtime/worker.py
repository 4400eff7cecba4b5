"""Main of a rank process: takes tasks, runs them, reports results and tracebacks."""

import atexit
import faulthandler
import os
import pickle
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NoReturn

import torch

from iris.errors import PeerError
from iris.runtime import context
from iris.runtime.transport import dumps

STACK_SIGNAL = signal.SIGUSR2
RENEW = b""


@dataclass(frozen=True)
class Setup:
    """What a fresh rank is told first."""

    env: dict[str, str]
    path: list[str]
    folder: str
    threads: int
    once: bool


@dataclass(frozen=True)
class Result:
    """A rank's answer to a task; ``value`` is pickled."""

    value: bytes


@dataclass(frozen=True)
class Failure:
    """How a rank failed.

    ``by_peer``: only because another did. ``reported``: the rank said so itself and goes on.
    ``cause``: the pickled exception. ``stopped``: by Ctrl-C, the caller's or a session's.
    """

    headline: str
    text: str
    by_peer: bool = False
    reported: bool = False
    cause: bytes | None = None
    stopped: bool = False


def adopt(descriptors: list[int]) -> tuple[int, int]:
    """Put the launcher's stdout and stderr in place; return the channel and stack file."""
    channel, out, err, stacks = descriptors
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    return channel, stacks


def main(channel: Connection, stacks: int) -> NoReturn:
    """Serve tasks, then end the process.

    Exit functions run, but the interpreter is not torn down: after a fork that copies all of
    torch's memory, page by page.
    """
    _serve(channel, stacks)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _serve(channel: Connection, stacks: int) -> None:
    """Take tasks until the launcher closes the channel (or one task, where it asked for that)."""
    faulthandler.enable(file=stacks)
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=False)
    setup: Setup = channel.recv()
    os.environ.clear()
    os.environ.update(setup.env)
    sys.path[:] = setup.path
    os.chdir(setup.folder)
    torch.set_num_threads(setup.threads)
    while True:
        try:
            task = channel.recv_bytes()
        except EOFError:
            return
        channel.send(_renew() if task == RENEW else _answer(task))
        if setup.once:
            return


def _answer(task: bytes) -> Result | Failure:
    try:
        fn, args, kwargs = pickle.loads(task)
        answer = fn(*args, **kwargs)
        # A local mesh describes its failures itself, by the frames that are its user's.
        return answer if isinstance(answer, Failure) else Result(dumps(answer))
    except BaseException as error:
        trace = error.__traceback__.tb_next if error.__traceback__ else None  # without this module
        return failed(error, "".join(traceback.format_exception(type(error), error, trace)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def failed(error: BaseException, text: str, stopped: bool = False) -> Failure:
    """Tell the peers, and describe the error for the launcher; ``text`` says where it was."""
    headline = context.describe(error)
    found = context.current_or_none()
    if found is not None:
        found.fail(headline)
    by_peer = stopped or isinstance(error, PeerError)
    return Failure(headline, text, by_peer, True, _pickled(error), stopped)


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def _renew() -> Result:
    """Forget a failed task: the context is as if no rank had failed."""
    found = context.current_or_none()
    if found is not None:
        found.renew()
    return Result(dumps(None))
