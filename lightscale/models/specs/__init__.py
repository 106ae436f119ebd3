"""What is known of mixers and shared parts before they are built. Nothing here imports torch."""
