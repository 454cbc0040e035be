"""Checks whether other users can change a file or directory that umem is about to obey."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path


def doubt(path: Path) -> str:
    """Return why another user could have written the file or directory; empty if none could.

    The owner of the file, and of a link to it, must be this user or root.

    Raises:
        OSError: it does not exist, or its status cannot be read.
    """
    for found in (path.lstat(), path.stat()):
        if found.st_uid not in (os.geteuid(), 0):
            return f"it belongs to user {found.st_uid}"
        if stat.S_ISLNK(found.st_mode):
            continue  # the mode of a link means nothing
        if found.st_mode & stat.S_IWOTH:
            return "other users can write to it (chmod o-w)"
        if found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid, found.st_uid):
            return f"group {found.st_gid} can write to it (chmod g-w)"
    return ""


def _is_private(group: int, user: int) -> bool:
    """Return whether the group is the user's private group, which has the user's name.

    On systems with private groups, the usual umask lets the group write to all files.
    """
    try:
        owner, found = pwd.getpwuid(user), grp.getgrgid(group)
    except KeyError:
        return False
    named_alike = owner.pw_gid == group and owner.pw_name == found.gr_name
    return named_alike and {*found.gr_mem} <= {owner.pw_name}
