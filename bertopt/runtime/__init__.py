"""Text in, answers out."""
