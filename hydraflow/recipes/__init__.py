"""Problems and a small model that are made on the spot: the default recipe."""
