"""The default policy, `auto`: its planner and the estimates that guide it."""
