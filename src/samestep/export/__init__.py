"""A trained model as a file for programs that know nothing of samestep."""
