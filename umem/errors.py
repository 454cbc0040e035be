"""The errors that umem raises; docs/errors.md describes what to do about each."""

from __future__ import annotations


class UmemError(Exception):
    """The base class of all umem errors; umem never raises it directly."""


class ConfigError(UmemError, ValueError):
    """An option is unknown, malformed or out of bounds; the message lists what is allowed."""


class OutOfMemoryError(UmemError, MemoryError):
    """Device budget and host budget together cannot hold the requested bytes."""


class NotSupportedError(UmemError, RuntimeError):
    """This machine or installation lacks something; the message names it and a remedy."""


class StateError(UmemError, RuntimeError):
    """The call does not fit umem's present state, such as on with other options."""


class DriverError(UmemError, RuntimeError):
    """The device driver reported a failure that umem could not handle."""


class TraceError(UmemError, ValueError):
    """A trace is malformed; the message gives the file, the line and the reason."""


class PlanError(UmemError, RuntimeError):
    """A program cannot be planned as it is; the message gives the place and a remedy."""


class CheckpointError(UmemError, RuntimeError):
    """A checkpoint is malformed or does not fit the module; the message names file and tensors."""


def did_you_mean(word: str, known: tuple[str, ...] | list[str]) -> str:
    """Return ` (did you mean X?)` for the end of a sentence, or "" if no known word is close."""
    import difflib  # here, because only errors need it

    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def kind_of(value: object) -> str:
    """Return the type of a value with its article, as in "an int"."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def plain(text: str) -> str:
    """Escape characters that could control a terminal or that cannot be displayed."""
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]


def shown(value: object) -> str:
    """Return an untrusted value for a message, in at most 40 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits
        return f"a huge {type(value).__name__}"
    return text if len(text) <= 40 else f"{text[:37]}..."
