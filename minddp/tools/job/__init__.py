"""A job, for several tools: starting its ranks, the place of a rank in it, and the store where the ranks meet."""
