"""The options of a process, merged from all sources. Only this module reads umem's variables.

A value comes from the first of: the call or the command line, the environment, `[tool.umem]` of the
nearest pyproject.toml at or above the working directory, the default. A pyproject.toml may come
with a downloaded directory or belong to another user: umem ignores one that others can write, and
lets none choose which code is loaded or which files are written.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

from ..base import log, paths, trust
from ..errors import ConfigError, NotSupportedError, did_you_mean, kind_of, plain, shown
from .options import BY_ENV, BY_NAME, OPTIONS, SETTABLE, Option
from .parsers import Budget, Device, Disk, Share, parse_path

_log = logging.getLogger("umem")
_ignored: set[Path] = set()  # ignored pyproject.toml files that were logged


@dataclass(frozen=True)
class Settings:
    """All options, parsed. Two are equal if their values are equal, whatever the sources."""

    budget: Budget
    host_budget: int | None  # None: auto; 0: unlimited
    disk: Disk | None
    disk_writes: int  # bytes a day; 0: unlimited
    policy: object  # a name, module:attribute, file.py:attribute, or a policy itself
    min_swap: int
    device: Device
    log: str
    guard: bool
    backing: str
    allocator: str
    observer: str
    recompute: str
    optimizer: Share
    optimizer_threads: int  # 0: as many as torch uses
    optimizer_buffers: int
    torch_ext_cache: Path
    trace: Path | None  # None: off
    layout: str
    top: bool | Path
    watchdog: float  # seconds; 0: off
    summary: bool = field(compare=False)
    enabled: bool = field(compare=False)
    strict: bool = field(compare=False)
    origins: Mapping[str, str] = field(compare=False)

    def refusal(self, name: str, reason: str, allowed: str | None = None) -> ConfigError:
        """Return an error about the value of the option `name`."""
        return refusal(BY_NAME[name], self.origins[name], reason, allowed)


def load(
    given: Mapping[str, object] | None = None,
    *,
    flags: bool = False,
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Settings:
    """Read every option from every source.

    Args:
        given: options of a call or a command line; None means "not given".
        flags: whether errors about `given` name `--budget` instead of `budget=`.
        environ, directory: replace the process's environment and working directory.

    Raises:
        ConfigError: unknown name or bad value; the message names the source and what is allowed.
    """
    environ = os.environ if environ is None else environ
    file = _read_pyproject(directory)
    layers = [
        _from_defaults(environ),
        _from_pyproject(file),
        _from_environment(environ),
        _from_call(given or {}, flags),
    ]
    parsed: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        for option, origin, value in layer:
            # A policy object needs no parsing.
            text = isinstance(value, str)
            parsed[option.name] = parse(option, origin, str(value)) if text else value
            origins[option.name] = origin
    if file.table and file.doubt and file.path not in _ignored:
        _ignored.add(file.path)
        log.set_up(parsed["log"])
        _log.warning("%s is ignored, with its [tool.umem]: %s", file.path, file.doubt)
    return Settings(**parsed, origins=origins)


def parse(option: Option, origin: str, text: str) -> object:
    """Return the value of `text`; a ConfigError names `origin` if `text` is not valid."""
    try:
        return option.parse(text)
    except ValueError as error:
        reason = str(error) if repr(text) in str(error) else f"{text!r}: {error}"
        raise refusal(option, origin, reason) from None


def refusal(option: Option, origin: str, reason: str, allowed: str | None = None) -> ConfigError:
    """Return an error about an option's value, in the form that all of them share."""
    return ConfigError(f"{origin}: {reason}; allowed: {allowed or option.allowed}")


def differing(now: Settings, asked: Settings) -> list[str]:
    """Return the names of the options that differ; a policy object equals only itself."""
    names = [f.name for f in fields(Settings) if f.compare]
    return [name for name in names if not _is_same(getattr(now, name), getattr(asked, name))]


def _is_same(one: object, other: object) -> bool:
    # The program's objects may define equality in any way.
    ours = type(one).__module__.partition(".")[0] in ("builtins", "pathlib", "umem")
    return one is other or (ours and type(one) is type(other) and one == other)


def difference(now: Settings, asked: Settings) -> str:
    """Return the message for a call that requests other options than those in force."""

    def text(settings: Settings) -> str:
        values = ((name, getattr(settings, name)) for name in differing(now, asked))
        return ", ".join(f"{name}={getattr(value, 'name', value)}" for name, value in values)

    have, want = text(now), text(asked)
    return (
        f"umem is already on with {have}, but {want} was requested; call umem.disable() first, or "
        "umem.set_budget() to change the budget"
    )


# `umem run` sets these unless the environment or the command line does.
_RUN_USUAL = {"UMEM_STRICT": "1", "UMEM_SUMMARY": "1"}
# The variables that `umem run` set from its command line, one NAME=TEXT a line: errors of the
# program name the option that the user typed.
_TYPED = "_UMEM_TYPED"
# The bytes after which the program's trace ends; set by `umem run --report`.
TRACE_MOST = "_UMEM_TRACE_MOST"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--budget` and all other settable options; the values stay text."""
    group = parser.add_argument_group("options (each also as environment variable)")
    for option in SETTABLE:
        usual = "on" if option.env in _RUN_USUAL else option.default
        text = f"{option.allowed}. Default {usual}; {option.env}".replace("%", "%%")
        group.add_argument(option.flag, dest=option.name, metavar=option.kind.upper(), help=text)


def given_arguments(args: argparse.Namespace) -> dict[str, str]:
    """Return the options of `add_arguments` that the command line gave."""
    texts = {option.name: getattr(args, option.name) for option in SETTABLE}
    return {name: text for name, text in texts.items() if text is not None}


def run_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that starts a program under umem with the options `given`.

    Their relative paths are those of this folder, whatever folder the program works in later.

    Raises:
        NotSupportedError: the environment keeps torch from loading umem.
    """
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        raise NotSupportedError(
            "TORCH_DEVICE_BACKEND_AUTOLOAD keeps torch from loading umem; unset it, or call "
            "umem.enable() in the program"
        )
    texts = {BY_NAME[name].env: _placed(BY_NAME[name], text) for name, text in given.items()}
    typed = "\n".join(f"{name}={text}" for name, text in texts.items())
    inherited = {
        name: text for name, text in os.environ.items() if text.strip() or not _is_ours(name)
    }  # an empty variable of umem's is not set
    return {**_RUN_USUAL, **inherited, "UMEM": "1", **texts, _TYPED: typed}


def _placed(option: Option, text: str) -> str:
    """Return an option's text; if it is a relative path, from the root."""
    match option.kind:
        case "policy":
            is_path = text.rpartition(":")[0].endswith(".py")
        case "socket":
            is_path = "/" in text
        case kind:
            is_path = kind in ("folder", "path", "file") and text.strip().lower() != "off"
    return str(Path.cwd() / text) if is_path and not text.startswith("~") else text


def child_environment() -> dict[str, str]:
    """Return the environment without umem's variables, for a child with options of its own."""
    return {
        name: text
        for name, text in os.environ.items()
        if not (_is_ours(name) or name.startswith("_UMEM_"))
    }


def trace_most() -> int:
    """Return the bytes after which a trace ends; 0: no limit."""
    return int(os.environ.get(TRACE_MOST, "0"))


def runtime_directory() -> Path | None:
    """Return this user's directory for sockets; None if the system made none."""
    text = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(text) if text and os.path.isdir(text) else None


_Layer = Iterator[tuple[Option, str, object]]


def _is_ours(name: str) -> bool:
    return name == "UMEM" or name.startswith("UMEM_")


def _from_defaults(environ: Mapping[str, str]) -> _Layer:
    for option in OPTIONS:
        text = option.default
        if option.name == "torch_ext_cache":
            text = _default_cache(environ, text)
        yield option, f"{option.name} (default)", text


def _default_cache(environ: Mapping[str, str], usual: str) -> str:
    if xdg := environ.get("XDG_CACHE_HOME"):
        return str(Path(xdg) / "umem")
    with contextlib.suppress(ValueError):  # there is no home directory
        if paths.can_hold(parse_path(usual)):
            return usual
    import tempfile

    with contextlib.suppress(FileNotFoundError):  # no directory can be written; nor need it be
        # Another user's directory is refused later.
        return str(Path(tempfile.gettempdir()) / f"umem-cache-{os.getuid()}")
    return usual


def _from_environment(environ: Mapping[str, str]) -> _Layer:
    typed = environ.get(_TYPED, "").split("\n")
    for name in filter(_is_ours, environ):
        if name not in BY_ENV:
            hint = did_you_mean(name, list(BY_ENV))
            raise ConfigError(
                f"{plain(name)}={environ[name]!r}: no such option{hint}; allowed: "
                f"{', '.join(BY_ENV)}"
            )
        if environ[name].strip():  # an empty variable counts as unset, as usual in shells
            option, text = BY_ENV[name], environ[name]
            yield option, option.flag if f"{name}={text}" in typed else name, text


def _from_call(given: Mapping[str, object], flags: bool) -> _Layer:
    for name, value in given.items():
        option = _settable(name, "umem")
        if value is not None:
            origin = option.flag if flags else f"{name}="
            is_text = isinstance(value, (bool, str, int, Path)) or option.kind != "policy"
            yield option, origin, _text(option, origin, value) if is_text else value


class _Pyproject(NamedTuple):
    """A pyproject.toml with its [tool.umem], and the reason not to trust it; "" if trusted."""

    path: Path
    table: Mapping[str, object]
    doubt: str


def _from_pyproject(file: _Pyproject) -> _Layer:
    if file.doubt:
        return
    for key, value in file.table.items():
        option = _settable(key.replace("-", "_"), f"[tool.umem] of {file.path}")
        origin = f"{key} in [tool.umem] of {file.path}"
        if option.is_path:
            raise ConfigError(
                f"{origin}: a pyproject.toml may not name a file or directory, because it can come "
                f"from someone else; use {option.env} or {option.name}="
            )
        text = _text(option, origin, value)
        if option.kind == "policy" and ":" in text:
            raise refusal(
                option, origin, f"{text!r} names code to load",
                "a policy's name here; for code use umem.enable(policy=...), --policy or "
                "UMEM_POLICY",
            )  # fmt: skip
        yield option, origin, text


def _read_pyproject(directory: Path | None) -> _Pyproject:
    """Read the nearest file; return an empty table without one, or if an untrusted one is bad."""
    path = _nearest_pyproject(directory)
    if path is None:
        return _Pyproject(Path(), {}, "")
    doubt = trust.doubt(path)
    if not doubt and (of_folder := trust.doubt(path.parent)):
        doubt = f"its directory: {of_folder}"
    try:
        return _Pyproject(path, _umem_table(path), doubt)
    except ConfigError:
        if doubt:
            return _Pyproject(path, {}, doubt)
        raise


def _nearest_pyproject(directory: Path | None) -> Path | None:
    try:
        start = (directory or Path.cwd()).absolute()
    except FileNotFoundError:  # the working directory was deleted
        return None
    paths = (folder / "pyproject.toml" for folder in (start, *start.parents))
    return next((path for path in paths if os.path.isfile(path)), None)


def _umem_table(path: Path) -> dict[str, object]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read for [tool.umem]: {error}") from None
    tool = document.get("tool", {})
    table = tool.get("umem", {}) if isinstance(tool, dict) else {}
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: tool.umem must be a table of options")
    return table


def _settable(name: str, where: str) -> Option:
    option = BY_NAME.get(name)
    if option is not None and not option.env_only:
        return option
    if option is not None:
        raise ConfigError(f"{name}: only the environment variable {option.env} sets this option")
    known = [option.name for option in SETTABLE]
    hint = did_you_mean(name, known)
    raise ConfigError(f"{where} has no option {name!r}{hint}; allowed: {', '.join(known)}")


def _text(option: Option, origin: str, value: object) -> str:
    """Return `value` in the form of an environment variable."""
    if isinstance(value, bool):
        if option.kind in ("switch", "socket"):
            return "1" if value else "0"
    elif isinstance(value, (str, Integral, Path)) or (
        option.kind == "seconds" and type(value) is float
    ):
        with contextlib.suppress(ValueError):  # an integer with thousands of digits
            return str(value)
    raise refusal(option, origin, f"{shown(value)} is {kind_of(value)}")
