"""Reports: one self-contained HTML file each, with its pictures inside."""
