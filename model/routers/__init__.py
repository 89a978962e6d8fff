"""One router per module, and the table that names them."""
