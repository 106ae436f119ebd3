"""Reports: one HTML file each, with its pictures inside; nothing is loaded from elsewhere."""
