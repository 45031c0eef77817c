"""What is SGLang's: its endpoints, and the ways in which weights reach it."""
