"""The trainer: the processes that hold the model and take the inner steps."""
