"""What models learn, and how fast."""
