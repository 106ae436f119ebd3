"""Facts about mixers and shared parts before they are built, without torch."""
