"""The hook that torch calls at the end of `import torch` (entry point group `torch.backends`).

An exception here would break every `import torch` on the machine, so none is raised unless the user
requests it. This module imports only os, because torch loads it even if umem is off. It is outside
of the package because a script of the user's can be named `umem.py`, and come before the package.
"""

import os


def init() -> None:
    """Turn umem on if the environment variable UMEM is set to a true value.

    If that fails, this prints one warning and torch stays unchanged. With UMEM_STRICT=1, which
    `umem run` sets, it prints one line and exits with code 2, because torch would turn an exception
    into a long traceback that recommends turning umem off.
    """
    if os.environ.get("UMEM", "").strip().lower() in ("", "0", "off", "false", "no"):
        return
    try:
        import umem

        if not hasattr(umem, "__path__"):
            raise ImportError(f"{umem.__file__} hides the package umem; give it another name")
        umem._enable_at_import()
    except Exception as error:  # noqa: BLE001 - no error may break `import torch`
        if os.environ.get("UMEM_STRICT", "").strip().lower() in ("1", "on", "true", "yes"):
            _say(f"umem: error: {error}")
            raise SystemExit(2) from None
        _say(f"umem: stays off, torch is unchanged: {error}")


def _say(text: str) -> None:
    import sys

    if sys.stderr is not None:  # cron closes it, and print would use stdout then
        try:  # noqa: SIM105 - this imports only os
            print(text, file=sys.stderr)
        except (OSError, ValueError):  # a full disk, or a pipe that nobody reads
            pass
