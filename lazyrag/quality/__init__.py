"""Answer quality: which nodes are computed anew, where they stand, how attention treats them."""
