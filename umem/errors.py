"""The errors that umem raises on purpose. docs/errors.md says what to do about each."""

from __future__ import annotations


class UmemError(Exception):
    """Base class of all umem errors; never raised itself."""


class ConfigError(UmemError, ValueError):
    """An option is unknown, malformed or out of bounds; the message says what is allowed."""


class OutOfMemoryError(UmemError, MemoryError):
    """Device budget and host budget together cannot hold the requested bytes."""


class NotSupportedError(UmemError, RuntimeError):
    """This machine or installation lacks something; the message says what, and what to do."""


class StateError(UmemError, RuntimeError):
    """The call does not fit the state that umem is in, such as enabled with other options."""


class DriverError(UmemError, RuntimeError):
    """The device driver reported a failure that umem could not handle."""


class TraceError(UmemError, ValueError):
    """A trace is malformed; the message has the file, the line and the reason."""


class PlanError(UmemError, RuntimeError):
    """A program cannot be planned as it is; the message says where, and what to do."""


class CheckpointError(UmemError, RuntimeError):
    """A checkpoint is malformed or does not fit the module; the message names file and tensors."""


def did_you_mean(word: str, known: tuple[str, ...] | list[str]) -> str:
    """Return ` (did you mean X?)` for the end of a sentence, or "" if no known word is close."""
    import difflib  # only needed on the way to an error

    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def plain(text: str) -> str:
    """Escape the characters that could control a terminal, and those that none can show."""
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]


def shown(value: object) -> str:
    """Return a value from elsewhere for a message: at most 40 characters, whatever it is."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits
        return f"a huge {type(value).__name__}"
    return text if len(text) <= 40 else f"{text[:37]}..."
