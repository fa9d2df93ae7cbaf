"""Linear layers of few tokens."""
