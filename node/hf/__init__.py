"""To and from Hugging Face's format."""
