"""Many runs of one config: cross-validation, and searches for its values."""
