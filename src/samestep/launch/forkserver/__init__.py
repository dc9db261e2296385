"""Commands of ours in processes that are forked from one that has torch imported already."""
