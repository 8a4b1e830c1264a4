"""What tests share: reference loops, small data and networks, and what runs commands and processes."""
