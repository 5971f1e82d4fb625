"""One file a policy: the idea it follows, and the paper it is from."""
