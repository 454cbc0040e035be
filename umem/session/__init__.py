"""The session: umem turned on, with its settings, and its work at the end of each step."""
