"""umem's figures for people."""
