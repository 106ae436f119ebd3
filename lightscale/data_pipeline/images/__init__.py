"""From files of images to a store of pixels; README.md in this folder."""
