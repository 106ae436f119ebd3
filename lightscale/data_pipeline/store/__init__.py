"""The token store on disk: written once by preparation, read by loading."""
