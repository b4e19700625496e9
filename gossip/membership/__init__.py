"""Who is there: announcements, how they spread, silence, and how far islands are apart."""
