"""The files of an export, each read and written by itself."""
