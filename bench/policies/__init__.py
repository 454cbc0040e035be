"""Every policy on the steps of real networks, replayed in virtual time against the bounds."""
