"""The session: umem turned on, its settings, and the work at the end of each step."""
