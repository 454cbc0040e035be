"""``python -m umem`` is ``umem``."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
