"""Options: their table, their values and the sources they come from."""
