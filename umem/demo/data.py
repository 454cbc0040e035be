"""Real data from installed packages; nothing is downloaded."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

from umem.base import extras
from umem.errors import NotSupportedError

if TYPE_CHECKING:
    from torch import Tensor


def need(module: str) -> Any:
    """Import an optional module of the demo.

    Raises:
        NotSupportedError: the module is not installed; the message says what to install.
    """
    return extras.load(module, "the demo", extras.DEMO)


def digits(image: int) -> tuple[Tensor, Tensor]:
    """Return all 1797 handwritten digits of scikit-learn as (images, labels) on the CPU.

    The images are (1797, 1, image, image) float32, scaled up from 8 x 8 and normalised; the labels
    are int64 in 0..9.
    """
    torch = need("torch")
    bunch = need("sklearn.datasets").load_digits()
    small = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16.0
    large = torch.nn.functional.interpolate(
        small, size=(image, image), mode="bilinear", align_corners=False
    )
    large = (large - large.mean()) / large.std()
    return large, torch.tensor(bunch.target, dtype=torch.int64)


def stdlib_text(limit: int, folder: Path | None = None) -> str:
    """Return the first `limit` ASCII characters of the standard library's ``*.py``, by name.

    Raises:
        NotSupportedError: this Python has no sources of its standard library.
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    text = ""
    for path in sorted(root.glob("*.py")):
        text += path.read_bytes().decode("ascii", errors="ignore").replace("\r\n", "\n")
        if len(text) >= limit:
            return text[:limit]
    raise NotSupportedError(
        f"{root} holds {len(text)} characters of Python source, but the demo's text needs {limit}; "
        "use a Python that ships the sources of its standard library"
    )
