"""What PASS++ and its rivals compute. Knows neither accelerate nor files."""
