"""What torch calls at the end of `import torch` (entry point group `torch.backends`).

An exception here would break every `import torch` on the machine, so there is none unless the user
asked for it. This module imports only os, because it is loaded even where umem is off.
"""

import os


def init() -> None:
    """Turn umem on if the environment variable UMEM says so.

    When that fails: one warning, and torch stays as it was. With UMEM_STRICT=1, which `umem run`
    sets, one line and exit code 2, because torch would turn an exception into a long traceback that
    recommends to turn umem off.
    """
    if os.environ.get("UMEM", "").strip().lower() in ("", "0", "off", "false", "no"):
        return
    try:
        from .runtime import enable_at_import

        enable_at_import()
    except Exception as error:  # noqa: BLE001 - whatever it is, it must not break `import torch`
        import sys

        if os.environ.get("UMEM_STRICT", "").strip().lower() in ("1", "on", "true", "yes"):
            print(f"umem: error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        print(f"umem: stays off, torch is unchanged: {error}", file=sys.stderr)
