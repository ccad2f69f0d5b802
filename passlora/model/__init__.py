"""What a user holds: a model that is taught, asked, restored and passed on."""
