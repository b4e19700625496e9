"""Rounds without a trainer: what links and the averaging engine give (``node bench``)."""
