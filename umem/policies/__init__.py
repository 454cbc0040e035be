"""What to evict and what to fetch, and when. One policy a file."""
