"""Files and directories that no other user can change: only those decide what this process does."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path


def doubt(path: Path) -> str:
    """Return why another user could have written the file or directory; empty if none could.

    Its owner has to be this user, or root, and that of a link to it too. What root owns is safe:
    root decides anyway.

    Raises:
        OSError: it does not exist, or cannot be looked at.
    """
    for found in (path.lstat(), path.stat()):
        if found.st_uid not in (os.geteuid(), 0):
            return f"it belongs to user {found.st_uid}"
        if stat.S_ISLNK(found.st_mode):
            continue  # a link has all mode bits
        if found.st_mode & stat.S_IWOTH:
            return "other users can write to it (chmod o-w)"
        if found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid, found.st_uid):
            return f"group {found.st_gid} can write to it (chmod g-w)"
    return ""


def _is_private(group: int, user: int) -> bool:
    """Return whether the group is the user's own, as systems make one that is named like the user.

    Where they do, the usual umask lets that group write to all files.
    """
    try:
        owner, found = pwd.getpwuid(user), grp.getgrgid(group)
    except KeyError:
        return False
    named_alike = owner.pw_gid == group and owner.pw_name == found.gr_name
    return named_alike and {*found.gr_mem} <= {owner.pw_name}
