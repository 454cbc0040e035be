"""A report of a step under a policy, as one HTML page: `umem report`."""
