"""What the server says: the lines of its log, and the access log in them."""
