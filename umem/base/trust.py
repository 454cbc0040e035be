"""Files and directories that no other user can change: only those decide what this process does."""

from __future__ import annotations

import grp
import os
import pwd
import stat


def doubt(found: os.stat_result) -> str:
    """Return why another user could have written a file or directory; empty if none could.

    Its owner has to be this user, or root. What root owns is safe: root decides anyway.
    """
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {found.st_uid}"
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
