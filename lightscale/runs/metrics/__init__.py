"""The metrics of a run while it trains: what is measured, and where it goes."""
