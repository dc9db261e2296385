"""The demo: one training at several sizes, killed and resumed, beside plain DDP."""
