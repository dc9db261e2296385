"""A trained model as a file for programs that do not use samestep."""
