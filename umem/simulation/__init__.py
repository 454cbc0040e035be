"""Replaying a recorded step on the engine, in virtual time."""
