"""Measurements a user can repeat: the offline limit of a model, the rate of the HTTP pipeline."""
