"""What people read: log streams, tables and progress on terminals, HTML pages."""
