"""The one way this project tells a user that something cannot be done."""


class BitwrightError(Exception):
    """A user's mistake or a limit of the machine: what is wrong, where, and how to fix it.

    Anything that is our own fault is an `assert` or an ordinary exception, and exits with 1.
    """

    exit_code = 3

    def __init__(self, what: str, where: str = "", how_to_fix: str = "") -> None:
        self.what, self.where, self.how_to_fix = what, where, how_to_fix
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n  fix: {self.how_to_fix}" if self.how_to_fix else text


class UsageError(BitwrightError):
    """A wrong command line or recipe."""

    exit_code = 2


class DataError(BitwrightError):
    """A model or a text that cannot be used as it is."""

    exit_code = 3


class ResourceError(BitwrightError):
    """Not enough memory or disk."""

    exit_code = 4


class GateFailed(BitwrightError):
    """The compressed model lost more than the recipe allows."""

    exit_code = 5
