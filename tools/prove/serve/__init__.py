"""The proof of `isoloss-serve`: a recorded session against servers on named layouts, disturbed in every way."""
