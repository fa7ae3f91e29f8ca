"""Where text comes from: files, datasets, and the tokens that are kept of them."""
