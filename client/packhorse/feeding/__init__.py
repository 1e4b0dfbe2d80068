"""What a Feed hands to the loop, and how."""
