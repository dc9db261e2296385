"""A run's embeddings as a page: points on maps, with pictures, classes and errors."""
