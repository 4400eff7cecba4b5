"""A mesh whose caller is not one of its ranks: calls of a program go to it with global tensors."""

from abc import ABC, abstractmethod
from typing import Any


class Controller(ABC):
    """What ``@iris.spmd(mesh=...)`` hands its calls to. ``function`` is the decorated function."""

    @abstractmethod
    def call_program(
        self, function: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the program on the ranks and return global tensors."""

    @abstractmethod
    def trace_program(
        self, function: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Trace the program on the ranks and return it as rank 0 has it."""
