"""One file a framework; nothing below imports these."""
