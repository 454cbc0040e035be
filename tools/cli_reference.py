"""The commands of ``umem`` with their arguments, read from the parsers; for the site's CLI page."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

from umem import cli

USAGE_COLUMNS = "96"  # argparse wraps usage lines by the environment's width


class Argument(NamedTuple):
    """An option or a positional argument."""

    form: str  # as `--budget SIZE`
    help: str


class CommandPage(NamedTuple):
    """The entry of a command or subcommand."""

    name: str  # as `umem trace info`
    description: str
    usage: str
    arguments: list[Argument]


def commands() -> list[CommandPage]:
    """Return a page for each command, and for each subcommand after its command."""
    parser = cli._parser({name: cli._load(name) for name in cli.COMMANDS})
    with mock.patch.dict(os.environ, {"COLUMNS": USAGE_COLUMNS}):
        return list(_pages(parser, ""))


def _pages(parser: argparse.ArgumentParser, short: str) -> Iterator[CommandPage]:
    description = parser.description or short
    if parser.prog != "umem":  # the list of commands is the page itself
        yield CommandPage(parser.prog, description, _usage(parser), _arguments(parser))
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, child in action.choices.items():
                yield from _pages(child, helps.get(name, ""))


def _usage(parser: argparse.ArgumentParser) -> str:
    return parser.format_usage().removeprefix("usage: ").rstrip()


def _arguments(parser: argparse.ArgumentParser) -> list[Argument]:
    formatter = argparse.HelpFormatter(parser.prog)
    return [
        Argument(formatter._format_action_invocation(action), _help(formatter, action))
        for action in parser._actions
        if not isinstance(action, (argparse._HelpAction, argparse._SubParsersAction))
    ]


def _help(formatter: argparse.HelpFormatter, action: argparse.Action) -> str:
    return formatter._expand_help(action) if action.help else ""
