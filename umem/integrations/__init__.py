"""Integrations: one file per framework; lower layers do not import these."""
