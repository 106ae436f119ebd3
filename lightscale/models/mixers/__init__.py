"""The token mixers, one file for each architecture, and the interface that they implement."""
