"""What goes out to a tool and what its reply means."""
