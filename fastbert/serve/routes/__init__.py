"""What each route takes and answers, and the table of them."""
